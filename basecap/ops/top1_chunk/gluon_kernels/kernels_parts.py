"""What the Gluon kernels share: a product's layout, the ring of stages, the descriptors by which TMA copies."""

import torch
import triton
import triton.experimental.gluon
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@triton.experimental.gluon.constexpr_function
def product_layout(columns):
    """Return how a warpgroup holds a product of 64 rows or more: each warp 16 rows of every 64."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@triton.experimental.gluon.jit
def next_stage(stage, phase, S: gl.constexpr):
    """Return the ring's next stage and the phase of its barriers."""
    stage += 1
    if stage == S:
        stage = 0
        phase ^= 1
    return stage, phase


def rows_for_tma(x: Tensor) -> Tensor:
    """Return x [N, H, K], or a copy of it, as TMA reads it: heads side by side, rows at multiples of 16 bytes."""
    _, H, K = x.shape
    side_by_side = x.stride(2) == 1 and (H == 1 or x.stride(1) == K) and x.stride(0) >= H * K
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if side_by_side and aligned else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of x [N, H, K] as [N, H * K], of which a copy takes `rows` rows of one head."""
    N, H, K = x.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, [N, H * K], [x.stride(0), 1], [rows, K], layout)
