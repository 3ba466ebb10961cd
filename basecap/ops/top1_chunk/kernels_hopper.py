"""The choice of one chunk on Hopper GPUs, in Gluon: warpgroups of 128 queries share one stream of keys.

A producer warp copies keys or mean keys by TMA into a ring of S stages. Each stage has two barriers: `full`, which
counts the bytes that have come, and `empty`, at which every warpgroup of queries arrives when it has read the stage.
While one warpgroup looks at its scores the products of the others run.

Exact programs have three warpgroups and a multiprocessor for themselves. Approximate ones are short, so that two of
them, of two warpgroups each, share a multiprocessor: one begins while the other works.
"""

import torch
import triton
import triton.experimental.gluon
import triton.language as tl
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

from basecap.ops.top1_chunk.kernels_choose import exp2_assembly

#: Queries of a warpgroup, and chunks of a tile of means.
ROWS = 128
MEANS = 64

#: Stages of the ring for each head size: what shared memory has room for.
EXACT_STAGES = {64: 4, 128: 3}
APPROX_STAGES = {64: 4, 128: 3}

#: Heads of this size or less wait for their exponentials, of which they make one of eight by polynomial.
POLYNOMIAL_HEADS = 64

#: The operands of `kernels_choose.exp2_assembly` for eight numbers.
EIGHT: gl.constexpr = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 16))

#: Scores up to this size (base 2) are bounded. `kernels_choose` takes all from 60 on: rounding leaves nobody out.
BOUND = 60.01


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


@triton.experimental.gluon.jit
def largest_norm(s_q, BQ: gl.constexpr, K: gl.constexpr):
    """Return the largest squared norm of the queries [BQ, K] in shared memory."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    b_q = s_q.load(wide).to(gl.float32)
    return gl.max(gl.sum(b_q * b_q, 1), 0)


@triton.experimental.gluon.jit
def powers(s, scale2, ASSEMBLY: gl.constexpr):
    """Return 2^(s * scale2), by the special-function units alone if there is no ASSEMBLY."""
    if ASSEMBLY == "":
        out = gl.exp2(s * scale2)
    else:
        out = gl.inline_asm_elementwise(
            ASSEMBLY, EIGHT, [s, scale2], dtype=gl.float32, is_pure=True, pack=8
        )  # fmt: skip
    return out


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
    turn,
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
    ASSEMBLY: gl.constexpr,
    PART: gl.constexpr,
):
    """Choose for the BQ queries from `row` on, unless their masses are not `bounded`; empty the ring in any case.

    With ASSEMBLY for the exponentials, which small heads wait for, the warpgroups' products take turns: so two of them
    are always at their exponentials.
    """
    FIRST: gl.constexpr = 1 if PART == 0 else 0
    NEXT: gl.constexpr = (PART + 1) % 3
    tile: gl.constexpr = product_layout(C)
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
            if ASSEMBLY != "":
                mbarrier.wait(turn.index(PART), (c - low + FIRST) & 1)
            s = warpgroup_mma(s_q, s_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            if ASSEMBLY != "":
                mbarrier.arrive(turn.index(NEXT))
            mbarrier.arrive(empty.index(stage))
            score = gl.sum(powers(s, scale2, ASSEMBLY), 1)
            better = (score > best) & (first <= c) & (c < own)
            best = gl.where(better, score, best)
            index = gl.where(better, c, index)
            stage, phase = next_stage(stage, phase, S)
        gl.store(p_choice + o_t.to(gl.int64) * H + h, index, m_t)
    else:
        for c in range(low, high):
            mbarrier.wait(full.index(stage), phase)
            if ASSEMBLY != "":
                mbarrier.wait(turn.index(PART), (c - low + FIRST) & 1)
                mbarrier.arrive(turn.index(NEXT))
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
    ASSEMBLY: gl.constexpr,
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
    turn = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    for i in gl.static_range(3):
        mbarrier.init(turn.index(i), count=1)
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
    # Triton 3.6 hands arguments over where the largest norm was reduced, without waiting until all warps have read it.
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (
                exact_queries,
                (p_own, p_grid, p_choice, s_q.index(0), s_k, ready, full, empty, turn, row, low, high, h, N,
                 scale2, bounded_0, H, BQ, C, S, ASSEMBLY, 0),
            ),
            (
                exact_queries,
                (p_own, p_grid, p_choice, s_q.index(1), s_k, ready, full, empty, turn, row + BQ, low, high, h, N,
                 scale2, bounded_1, H, BQ, C, S, ASSEMBLY, 1),
            ),
            (
                exact_queries,
                (p_own, p_grid, p_choice, s_q.index(2), s_k, ready, full, empty, turn, row + 2 * BQ, low, high, h, N,
                 scale2, bounded_2, H, BQ, C, S, ASSEMBLY, 2),
            ),
            (exact_keys, (p_grid, d_k, s_k, full, empty, low, high, g, K, C, S)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )  # fmt: skip


@triton.experimental.gluon.jit
def of_thread(x, BQ: gl.constexpr):
    """Return a product [BQ, 64] as [BQ, 4, 2, 2, 2, 2]: the last four dimensions lie within a thread, in order.

    Of every eight columns each of the four threads of a row has two that are neighbours.
    """
    return x.reshape([BQ, 2, 2, 2, 4, 2]).permute((0, 4, 1, 2, 3, 5))


@triton.experimental.gluon.jit
def better_of_two(score, column):
    """Return the greater along the last dimension, which has two elements, and its column; among equals the first."""
    left, right = gl.split(score)
    left_column, right_column = gl.split(column)
    later = right > left
    return gl.where(later, right, left), gl.where(later, right_column, left_column)


@triton.experimental.gluon.jit
def approx_queries(
    p_own,
    p_grid,
    p_choice,
    s_q,
    s_m,
    ready,
    full,
    empty,
    row,
    low,
    high,
    h,
    N,
    H: gl.constexpr,
    BQ: gl.constexpr,
    BM: gl.constexpr,
    S: gl.constexpr,
):
    """Choose for the BQ queries from `row` on. Each thread keeps the best of its own columns until the end."""
    tile: gl.constexpr = product_layout(BM)
    rows: gl.constexpr = gl.SliceLayout(1, tile)
    o_t = row + gl.arange(0, BQ, layout=rows)
    m_t = o_t < N
    own = gl.load(p_own + o_t, m_t, other=0)
    first = gl.load(p_grid + 3 * own + 2, m_t, other=1 << 30)
    # Chunks in between are candidates of all these queries: neither number falls along the row of tokens.
    latest = gl.load(p_grid + 3 * gl.load(p_own + gl.minimum(row + BQ, N) - 1) + 2)
    earliest = gl.load(p_own + gl.minimum(row, N - 1))
    o_m = gl.arange(0, BM, layout=gl.SliceLayout(0, tile))
    zero = gl.zeros([BQ, BM], gl.float32, layout=tile)
    # Without the thread's own part, which is added at the end, columns are constants.
    column = of_thread((o_m & ~6)[None, :] + gl.zeros([BQ, BM], gl.int32, layout=tile), BQ)
    index = gl.max(gl.max(gl.max(gl.max(column, 5), 4), 3), 2) * 0 - 1
    best = gl.where(index < 0, float("-inf"), 0.0)
    stage = 0
    phase = 0
    mbarrier.wait(ready, 0)
    for c in range(low, high, BM):
        mbarrier.wait(full.index(stage), phase)
        s = warpgroup_mma(s_q, s_m.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        after, phase = next_stage(stage, phase, S)
        mbarrier.wait(full.index(after), phase)
        s = warpgroup_mma(s_q, s_m.index(after).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(stage))
        mbarrier.arrive(empty.index(after))
        stage, phase = next_stage(after, phase, S)
        if (c < latest) | (c + BM > earliest):
            o_c = (c + o_m)[None, :]
            s = gl.where((first[:, None] <= o_c) & (o_c < own[:, None]), s, float("-inf"))
        score = of_thread(s, BQ)
        at = column
        for _ in gl.static_range(4):
            score, at = better_of_two(score, at)
        better = score > best
        best = gl.where(better, score, best)
        index = gl.where(better, c + at, index)
    thread = gl.arange(0, 4, layout=gl.SliceLayout(0, index.type.layout))
    top = gl.max(best, 1)
    chosen = gl.min(gl.where(best == top[:, None], index + 2 * thread[None, :], 1 << 30), 1)
    chosen = gl.where(top > float("-inf"), chosen, -1)
    gl.store(p_choice + o_t.to(gl.int64) * H + h, gl.convert_layout(chosen, rows), m_t)


@triton.experimental.gluon.jit
def approx_means(
    d_high,
    d_low,
    s_m,
    full,
    empty,
    low,
    high,
    base,
    K: gl.constexpr,
    BM: gl.constexpr,
    S: gl.constexpr,
):
    """Copy the means of the chunks low, low + 1, ... into the ring, each BM as two stages: high parts and low parts."""
    stage = 0
    phase = 1
    for c in range(low, high, BM):
        for part in gl.static_range(2):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BM * K * 2)
            d_m = d_high if part == 0 else d_low
            tma.async_copy_global_to_shared(d_m, [base + c, 0], full.index(stage), s_m.index(stage))
            stage, phase = next_stage(stage, phase, S)


@triton.experimental.gluon.jit
def approx_kernel(
    d_q,
    d_high,
    d_low,
    p_grid,
    p_own,
    p_choice,
    N,
    M,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    BQ: gl.constexpr,
    BM: gl.constexpr,
    S: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Choose by the score of the mean key, as `kernels_choose.choose_approx_kernel` does.

    Means come as two parts [G * M, K]. Beyond a head's last stand the next head's, or zeros: no query's candidates.
    """
    row = (gl.num_programs(0) - 1 - gl.program_id(0)) * (2 * BQ)
    h = gl.program_id(1)
    low = gl.load(p_grid + 3 * gl.load(p_own + row) + 2)
    high = gl.load(p_own + gl.minimum(row + 2 * BQ, N) - 1)
    s_q = gl.allocate_shared_memory(d_q.dtype, [2, BQ, K], d_q.layout)
    s_m = gl.allocate_shared_memory(d_high.dtype, [S, BM, K], d_high.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    mbarrier.expect(ready, 2 * BQ * K * 2)
    for w in gl.static_range(2):
        tma.async_copy_global_to_shared(d_q, [row + w * BQ, h * K], ready, s_q.index(w))
    gl.warp_specialize(
        [
            (
                approx_queries,
                (p_own, p_grid, p_choice, s_q.index(0), s_m, ready, full, empty, row, low, high, h, N, H, BQ, BM, S),
            ),
            (
                approx_queries,
                (p_own, p_grid, p_choice, s_q.index(1), s_m, ready, full, empty, row + BQ, low, high, h, N, H, BQ, BM,
                 S),
            ),
            (approx_means, (d_high, d_low, s_m, full, empty, low, high, h // GROUP * M, K, BM, S)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """Return x [N, H, K], or a copy of it, as TMA reads it: heads side by side, rows at multiples of 16 bytes."""
    _, H, K = x.shape
    train_in_processes = x.stride(2) == 1 and (H == 1 or x.stride(1) == K) and x.stride(0) >= H * K
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if train_in_processes and aligned else x.clone(memory_format=torch.contiguous_format)


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
    assembly = exp2_assembly(1, 8) if K <= POLYNOMIAL_HEADS else ""
    exact_kernel[triton.cdiv(N, 3 * ROWS), H](
        _descriptor(q, ROWS), _descriptor(k, chunk), grid, own, norm, choice, N, scale2, BOUND,
        H=H, GROUP=H // k.shape[1], K=K, C=chunk, BQ=ROWS, S=EXACT_STAGES[K], ASSEMBLY=assembly, REGISTERS=160,
        num_warps=4, maxnreg=128,
    )  # fmt: skip


def choose_approx(q: Tensor, means: Tensor, low: Tensor, grid: Tensor, own: Tensor, choice: Tensor) -> None:
    """Write the choice [N, H, 1] of all queries.

    Args:
        q: [N, H, K], K 64 or 128, 16 bits a number.
        means: [G, M, K], each chunk's mean key, contiguous; low: the same, what the first part lacks.
        grid: int32 [M, 3], own: int32 [N]; see `grid.chunk_grid`.
        choice: where the choice goes, int32.
    """
    q = _rows(q)
    N, H, K = q.shape
    G, M, _ = means.shape
    parts = (_descriptor(x.view(G * M, 1, K), MEANS) for x in (means, low))
    approx_kernel[triton.cdiv(N, 2 * ROWS), H](
        _descriptor(q, ROWS), *parts, grid, own, choice, N, M,
        H=H, GROUP=H // G, K=K, BQ=ROWS, BM=MEANS, S=APPROX_STAGES[K], REGISTERS=104, num_warps=4, maxnreg=80,
    )  # fmt: skip
