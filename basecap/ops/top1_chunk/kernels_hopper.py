"""The choice of one chunk on Hopper GPUs, in Gluon: warpgroups of 128 queries share one stream of keys.

A producer warp copies chunks of keys by TMA into a ring of S stages. Each stage has two barriers: `full`, which counts
the bytes that have come, and `empty`, at which every warpgroup of queries arrives when it has read the stage. While one
warpgroup makes exponentials the products of the others run, and three warpgroups read each chunk once.
"""

import torch
import triton
import triton.experimental.gluon
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

#: Queries of a warpgroup, of which the kernels have three.
ROWS = 128

#: Stages of the ring for each head size: what shared memory has room for.
EXACT_STAGES = {64: 4, 128: 3}

#: Scores up to this size (base 2) are bounded. `kernels_choose` takes all from 60 on: rounding leaves nobody out.
BOUND = 60.01


@triton.experimental.gluon.jit
def next_stage(stage, phase, S: gl.constexpr):
    """Return the ring's next stage and the phase of its barriers."""
    stage += 1
    if stage == S:
        stage = 0
        phase ^= 1
    return stage, phase


@triton.experimental.gluon.jit
def largest_norm(s_q, BQ: gl.constexpr, K: gl.constexpr):
    """Return the largest squared norm of the queries [BQ, K] in shared memory."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    b_q = s_q.load(wide).to(gl.float32)
    return gl.max(gl.sum(b_q * b_q, 1), 0)


@triton.experimental.gluon.jit
def exact_queries(
    p_own,
    p_grid,
    p_choice,
    s_q,
    s_k,
    ready,
    full,
    empty,
    row,
    low,
    high,
    h,
    N,
    scale2,
    bounded,
    H: gl.constexpr,
    BQ: gl.constexpr,
    C: gl.constexpr,
    S: gl.constexpr,
):
    """Choose for the BQ queries from `row` on, unless their masses are not `bounded`; empty the ring in any case."""
    tile: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    rows: gl.constexpr = gl.SliceLayout(1, tile)
    o_t = row + gl.arange(0, BQ, layout=rows)
    m_t = o_t < N
    own = gl.load(p_own + o_t, m_t, other=0)
    first = gl.load(p_grid + 3 * own + 2, m_t, other=1 << 30)
    best = gl.full([BQ], float("-inf"), gl.float32, layout=rows)
    index = gl.full([BQ], -1, gl.int32, layout=rows)
    zero = gl.zeros([BQ, C], gl.float32, layout=tile)
    stage = 0
    phase = 0
    mbarrier.wait(ready, 0)
    if bounded:
        for c in range(low, high):
            mbarrier.wait(full.index(stage), phase)
            s = warpgroup_mma(s_q, s_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(empty.index(stage))
            score = gl.sum(gl.exp2(s * scale2), 1)
            better = (score > best) & (first <= c) & (c < own)
            best = gl.where(better, score, best)
            index = gl.where(better, c, index)
            stage, phase = next_stage(stage, phase, S)
        gl.store(p_choice + o_t.to(gl.int64) * H + h, index, m_t)
    else:
        for _ in range(low, high):
            mbarrier.wait(full.index(stage), phase)
            mbarrier.arrive(empty.index(stage))
            stage, phase = next_stage(stage, phase, S)


@triton.experimental.gluon.jit
def exact_keys(
    p_grid,
    d_k,
    s_k,
    full,
    empty,
    low,
    high,
    g,
    K: gl.constexpr,
    C: gl.constexpr,
    S: gl.constexpr,
):
    """Copy the chunks low, low + 1, ..., high - 1 into the ring."""
    stage = 0
    phase = 1
    start = gl.load(p_grid + 3 * low)
    for c in range(low, high):
        # Chunks of packed sequences begin anywhere; the next one's place comes while this one is waited for.
        following = gl.load(p_grid + 3 * c + 3)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), C * K * 2)
        tma.async_copy_global_to_shared(d_k, [start, g * K], full.index(stage), s_k.index(stage))
        start = following
        stage, phase = next_stage(stage, phase, S)


@triton.experimental.gluon.jit
def exact_kernel(
    d_q,
    d_k,
    p_grid,
    p_own,
    p_norm,
    p_choice,
    N,
    scale2,
    bound,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    C: gl.constexpr,
    BQ: gl.constexpr,
    S: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Choose by attention mass, as `kernels_choose.choose_exact_kernel` does where it is BOUNDED.

    Blocks of BQ queries whose scores can reach `bound` in size are left out. Queries [N, H * K] and keys come by their
    descriptors, so that rows beyond the last are zeros.
    """
    row = (gl.num_programs(0) - 1 - gl.program_id(0)) * (3 * BQ)
    h = gl.program_id(1)
    g = h // GROUP
    # A program's queries can belong to many sequences: chunks are those from its first query's to its last query's.
    low = gl.load(p_grid + 3 * gl.load(p_own + row) + 2)
    high = gl.load(p_own + gl.minimum(row + 3 * BQ, N) - 1)
    s_q = gl.allocate_shared_memory(d_q.dtype, [3, BQ, K], d_q.layout)
    s_k = gl.allocate_shared_memory(d_k.dtype, [S, C, K], d_k.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    fence_async_shared()
    mbarrier.expect(ready, 3 * BQ * K * 2)
    for w in gl.static_range(3):
        tma.async_copy_global_to_shared(d_q, [row + w * BQ, h * K], ready, s_q.index(w))
    norm = gl.load(p_norm + g)
    mbarrier.wait(ready, 0)
    bounded_0 = gl.sqrt(largest_norm(s_q.index(0), BQ, K) * norm) * scale2 < bound
    bounded_1 = gl.sqrt(largest_norm(s_q.index(1), BQ, K) * norm) * scale2 < bound
    bounded_2 = gl.sqrt(largest_norm(s_q.index(2), BQ, K) * norm) * scale2 < bound
    # Nobody is to wait for keys that nobody reads.
    high = gl.where(bounded_0 | bounded_1 | bounded_2, high, low)
    gl.warp_specialize(
        [
            (
                exact_queries,
                (p_own, p_grid, p_choice, s_q.index(0), s_k, ready, full, empty, row, low, high, h, N, scale2,
                 bounded_0, H, BQ, C, S),
            ),
            (
                exact_queries,
                (p_own, p_grid, p_choice, s_q.index(1), s_k, ready, full, empty, row + BQ, low, high, h, N, scale2,
                 bounded_1, H, BQ, C, S),
            ),
            (
                exact_queries,
                (p_own, p_grid, p_choice, s_q.index(2), s_k, ready, full, empty, row + 2 * BQ, low, high, h, N, scale2,
                 bounded_2, H, BQ, C, S),
            ),
            (exact_keys, (p_grid, d_k, s_k, full, empty, low, high, g, K, C, S)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """Return x [N, H, K], or a copy of it, as TMA reads it: heads side by side, rows at multiples of 16 bytes."""
    _, H, K = x.shape
    side_by_side = x.stride(2) == 1 and (H == 1 or x.stride(1) == K) and x.stride(0) >= H * K
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if side_by_side and aligned else x.clone(memory_format=torch.contiguous_format)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of x [N, H, K] as [N, H * K], of which a copy takes `rows` rows of one head."""
    N, H, K = x.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, [N, H * K], [x.stride(0), 1], [rows, K], layout)


def choose_exact(
    q: Tensor, k: Tensor, grid: Tensor, own: Tensor, norm: Tensor, choice: Tensor, chunk: int, scale2: float
) -> None:
    """Write the choice [N, H, 1] of all blocks of queries whose scores times `scale2` are bounded.

    Args:
        q: [N, H, K], K 64 or 128, 16 bits a number.
        k: [N, G, K].
        grid: int32 [M, 3], own: int32 [N]; see `grid.chunk_grid`.
        norm: float32 [G], the largest squared norm of a key of each head.
        choice: where the choice goes, int32.
        chunk: 128.
        scale2: what scores are multiplied by to stand as powers of 2.
    """
    q, k = _rows(q), _rows(k)
    N, H, K = q.shape
    exact_kernel[triton.cdiv(N, 3 * ROWS), H](
        _descriptor(q, ROWS), _descriptor(k, chunk), grid, own, norm, choice, N, scale2, BOUND,
        H=H, GROUP=H // k.shape[1], K=K, C=chunk, BQ=ROWS, S=EXACT_STAGES[K], REGISTERS=160,
        num_warps=4, maxnreg=128,
    )  # fmt: skip
