"""The exact choice of one chunk on Hopper GPUs, in Gluon: warpgroups of 128 queries share one stream of keys.

A producer warp copies keys by TMA into a ring of S stages. Each stage has two barriers: `full`, which counts the bytes
that have come, and `empty`, at which every warpgroup of queries arrives when it has read the stage. While one warpgroup
looks at its scores the products of the others run. A program has three warpgroups and a multiprocessor for itself.
"""

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

from basecap.ops.top1_chunk.gluon_kernels.kernels_parts import descriptor, next_stage, product_layout, rows_for_tma
from basecap.ops.top1_chunk.triton_kernels.kernels_choose import exp2_assembly

#: Queries of a warpgroup.
ROWS = 128

#: Stages of the ring for each head size: what shared memory has room for.
STAGES = {64: 4, 128: 3}

#: Heads of this size or less wait for their exponentials, of which they make one of eight by polynomial.
POLYNOMIAL_HEADS = 64

#: The operands of `kernels_choose.exp2_assembly` for eight numbers.
EIGHT: gl.constexpr = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 16))

#: Scores up to this size (base 2) are bounded. `kernels_choose` takes all from 60 on: so rounding leaves no tile out.
BOUND = 60.01


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


@triton.experimental.gluon.jit(do_not_specialize=["N"])
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
    # Without bounded queries no keys are copied.
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
    q, k = rows_for_tma(q), rows_for_tma(k)
    N, H, K = q.shape
    assembly = exp2_assembly(1, 8) if K <= POLYNOMIAL_HEADS else ""
    exact_kernel[triton.cdiv(N, 3 * ROWS), H](
        descriptor(q, ROWS), descriptor(k, chunk), grid, own, norm, choice, N, scale2, BOUND,
        H=H, GROUP=H // k.shape[1], K=K, C=chunk, BQ=ROWS, S=STAGES[K], ASSEMBLY=assembly, REGISTERS=160,
        num_warps=4, maxnreg=128,
    )  # fmt: skip
