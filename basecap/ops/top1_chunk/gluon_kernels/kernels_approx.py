"""The approximate choice of one chunk on Hopper GPUs, in Gluon: warpgroups of 128 queries share one stream of means.

The ring and its barriers are those of `kernels_exact`. Programs are short, so that two of them, of two warpgroups each,
share a multiprocessor: one begins while the other works.
"""

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

from basecap.ops.top1_chunk.gluon_kernels.kernels_parts import descriptor, next_stage, product_layout, rows_for_tma

#: Queries of a warpgroup, and chunks of a tile of means.
ROWS = 128
MEANS = 64

#: Stages of the ring for each head size: what shared memory has room for.
STAGES = {64: 4, 128: 3}


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


@triton.experimental.gluon.jit(do_not_specialize=["N", "M"])
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


def choose_approx(q: Tensor, means: Tensor, low: Tensor, grid: Tensor, own: Tensor, choice: Tensor) -> None:
    """Write the choice [N, H, 1] of all queries.

    Args:
        q: [N, H, K], K 64 or 128, 16 bits a number.
        means: [G, M, K], each chunk's mean key, contiguous; low: the same, what the first part lacks.
        grid: int32 [M, 3], own: int32 [N]; see `grid.chunk_grid`.
        choice: where the choice goes, int32.
    """
    q = rows_for_tma(q)
    N, H, K = q.shape
    G, M, _ = means.shape
    parts = (descriptor(x.view(G * M, 1, K), MEANS) for x in (means, low))
    approx_kernel[triton.cdiv(N, 2 * ROWS), H](
        descriptor(q, ROWS), *parts, grid, own, choice, N, M,
        H=H, GROUP=H // G, K=K, BQ=ROWS, BM=MEANS, S=STAGES[K], REGISTERS=104, num_warps=4, maxnreg=80,
    )  # fmt: skip
