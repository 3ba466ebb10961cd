"""Launches the Triton kernels of `blocks`; all tensors are float32."""

import torch
import triton
from torch import Tensor

from basecap.ops.wkv6 import kernels


def assemble(reads: Tensor, writes: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores, reads, writes and decay of a block; see `blocks.assemble`."""
    *lead, C, R, K = reads.shape
    W = writes.shape[-2]
    inputs = [x.contiguous() for x in (reads, writes, log_decay)]
    shapes = ((C * R, C * W), (C * R, K), (C * W, K), (K,))
    out = tuple(reads.new_empty(*lead, *shape) for shape in shapes)
    blocks = lead_size(lead)
    if blocks:
        kernels.assemble_fwd_kernel[(blocks,)](*inputs, *out, K, **_constants(C, R, W, K))
    return out


def assemble_backward(
    grads: tuple[Tensor, ...], reads: Tensor, writes: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of reads, writes and log_decay from those of the four outputs."""
    *lead, C, R, K = reads.shape
    inputs = [x.contiguous() for x in (*grads, reads, writes, log_decay)]
    out = tuple(torch.empty_like(x) for x in inputs[-3:])
    blocks = lead_size(lead)
    if blocks:
        kernels.assemble_bwd_kernel[(blocks,)](*inputs, *out, K, **_constants(C, R, writes.shape[-2], K))
    return out


def carry(step: Tensor, added_BHMKV: Tensor, state_BHKV: Tensor) -> Tensor:
    """Return all states [B, H, M + 1, K, V]; see `blocks.carry`."""
    B, H, M, K, V = added_BHMKV.shape
    step, added, state = (x.contiguous() for x in (step, added_BHMKV, state_BHKV))
    states = added.new_empty(B, H, M + 1, K, V)
    BK, BV = (max(16, min(limit, triton.next_power_of_2(n))) for limit, n in ((1 << 30, K), (32, V)))
    if states.numel():
        kernels.carry_fwd_kernel[(B * H, triton.cdiv(V, BV))](
            step, added, state, states, M, K, V, MATRIX=step.dim() == 5, BK=BK, BV=BV
        )
    return states


def lead_size(lead: list[int]) -> int:
    """Return the number of blocks."""
    return int(torch.Size(lead).numel())


def _constants(C: int, R: int, W: int, K: int) -> dict[str, int]:
    BK = max(16, triton.next_power_of_2(K))
    return {"C": C, "R": R, "W": W, "BK": BK, "LEVELS": C.bit_length() - 1, "num_warps": 4 if R * W == 1 else 8}
