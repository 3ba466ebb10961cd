"""The recurrence of RWKV-5 and 6 in chunks of BT tokens in Triton, forward; see README.md.

Tensors: r, k [B, T, G, K]; v, o [B, T, H, V], contiguous; log_decay [B, T, G, K] with strides of its own; bonus [G, K];
states between chunks [B, M, H, K, V]; scores [B, M, G, BT, BT]. PARTS = H / G neighbouring heads of values share r, k
and decays. `starts` [B, T] is not zero where the state is emptied before a token; it and the first state may be None.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_joins import in_right, join, joined
from basecap.ops._recurrence.kernels_tiles import numbered_state

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def rows(base, i_m, T, stride, o_x, X, BT: tl.constexpr):
    """Addresses and mask of the tokens of a chunk and the channels `o_x` of one row and head, from `base` on."""
    o_c = tl.arange(0, BT)
    p = base + i_m * BT * stride + (o_c[:, None] * stride + o_x[None, :])
    return p, (i_m * BT + o_c < T)[:, None] & (o_x < X)[None, :]


@triton.jit
def matrix(base, i, BT: tl.constexpr):
    """Addresses of the [BT, BT] matrix number `i`."""
    o = tl.arange(0, BT)
    return base + i * BT * BT + (o[:, None] * BT + o[None, :])


@triton.jit
def decays(log_decay, stride_t, starts, i_m, T, o_k, K, BT: tl.constexpr):
    """The log decays of blocks of one token each: from their start to reading, from writing to their end, as a whole.

    Nothing is left before a token where the state is emptied.
    """
    p_w, m_w = rows(log_decay, i_m, T, stride_t, o_k, K, BT)
    b_all = tl.load(p_w, mask=m_w, other=0.0).to(tl.float32) * LOG2_E
    b_from = tl.zeros(b_all.shape, tl.float32)
    b_to = tl.zeros(b_all.shape, tl.float32)
    if starts is not None:
        o_t = i_m * BT + tl.arange(0, BT)
        empty = tl.load(starts + o_t, mask=o_t < T, other=0)[:, None] != 0
        b_all = tl.where(empty, float("-inf"), b_all)
        b_from = tl.where(empty, float("-inf"), b_from)
    return b_from, b_to, b_all


@triton.jit
def edges(log_decay, stride_t, starts, i_m, T, o_k, K, BACK: tl.constexpr, BT: tl.constexpr):
    """The decay from each token of a chunk to its end, with BACK from its start to each token; and across the chunk."""
    p_w, m_w = rows(log_decay, i_m, T, stride_t, o_k, K, BT)
    b_all = tl.load(p_w, mask=m_w, other=0.0).to(tl.float32)
    # What is between a token and the edge is summed up over the tokens one further: nothing is subtracted.
    STEP: tl.constexpr = -1 if BACK else 1
    o_c = tl.arange(0, BT)
    o_next = o_c + STEP
    m_next = (o_next >= 0) & (o_next < BT) & (i_m * BT + o_next < T)
    b_next = tl.load(p_w + STEP * stride_t, mask=m_w & m_next[:, None], other=0.0).to(tl.float32)
    if starts is not None:
        p_starts = starts + i_m * BT
        empty = tl.load(p_starts + o_c, mask=i_m * BT + o_c < T, other=0)[:, None] != 0
        b_all = tl.where(empty, float("-inf"), b_all)
        if not BACK:
            empty = tl.load(p_starts + o_next, mask=m_next, other=0)[:, None] != 0
        b_next = tl.where(empty, float("-inf"), b_next)
    b_sums = tl.cumsum(b_next, 0, reverse=not BACK)
    # The state meets one of the latter per chunk: errors of the GPU's fast exponential would add up.
    return tl.exp2(b_sums * LOG2_E), tl.exp(tl.sum(b_all, 0).to(tl.float64)).to(tl.float32)


@triton.jit
def walk_kernel(
    k, v, log_decay, starts, first, states, last,
    stride_b, stride_t, stride_h, T, H, K, V, M,
    PARTS: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks with BV columns of the state: keep it before each, then let it decay and add to it.

    With BACK from the end, for the gradients of the states after each chunk (k = r, v = do). `last` may be None.
    """
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_g, G = i_h // PARTS, H // PARTS
    o_k = tl.arange(0, BK)
    k += (i_b * T * G + i_g) * K
    v += (i_b * T * H + i_h) * V
    log_decay += i_b * stride_b + i_g * stride_h
    if starts is not None:
        starts += i_b * T
    b_state = tl.zeros([BK, BV], dtype=tl.float32)
    if first is not None:
        p_first, m_state = numbered_state(first, i_b * H + i_h, K, V, o_k, o_v)
        b_state += tl.load(p_first, mask=m_state, other=0.0).to(tl.float32)
    for i in range(M):
        i_m = tl.cast(i, tl.int64)
        if BACK:
            i_m = M - 1 - i_m
        p_k, m_k = rows(k, i_m, T, G * K, o_k, K, BT)
        p_v, m_v = rows(v, i_m, T, H * V, o_v, V, BT)
        b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
        b_decay, b_across = edges(log_decay, stride_t, starts, i_m, T, o_k, K, BACK, BT)
        p_state, m_state = numbered_state(states, (i_b * M + i_m) * H + i_h, K, V, o_k, o_v)
        tl.store(p_state, b_state.to(states.dtype.element_ty), mask=m_state)
        b_state *= b_across[:, None]
        b_state = tl.dot(tl.trans(b_k * b_decay), b_v, b_state, input_precision=PRECISION)
    if last is not None:
        p_last, m_state = numbered_state(last, i_b * H + i_h, K, V, o_k, o_v)
        tl.store(p_last, b_state, mask=m_state)


@triton.jit
def chunk_fwd_kernel(
    r, k, v, log_decay, bonus, starts, states, o, scores,
    stride_b, stride_t, stride_h, T, H, K, V, M,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, LEVELS: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A chunk's outputs and its scores, those of a token with itself on the diagonal."""
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_g, G = i_h // PARTS, H // PARTS
    i_row, i_keys, i_chunk = i_b * T * H + i_h, i_b * T * G + i_g, (i_b * M + i_m) * H + i_h
    o_c, o_v = tl.arange(0, BT), tl.arange(0, BV)
    log_decay += i_b * stride_b + i_g * stride_h
    if starts is not None:
        starts += i_b * T
    b_own = tl.zeros([BT], dtype=tl.float32)
    b_scores = tl.zeros([BT, BT], dtype=tl.float32)
    b_o = tl.zeros([BT, BV], dtype=tl.float32)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        p_r, m_k = rows(r + i_keys * K, i_m, T, G * K, o_k, K, BT)
        p_k, m_k = rows(k + i_keys * K, i_m, T, G * K, o_k, K, BT)
        b_r = tl.load(p_r, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
        b_bonus = tl.load(bonus + i_g * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_own += tl.sum(b_r * b_k * b_bonus[None, :], 1)
        b_from, b_to, b_all = decays(log_decay, stride_t, starts, i_m, T, o_k, K, BT)
        for level in tl.static_range(LEVELS):
            # Right blocks read what left ones write: one tile is both.
            right = in_right(o_c, level)[:, None]
            b_both = tl.where(right, b_r, b_k) * tl.exp2(tl.where(right, b_from, b_to))
            b_both = b_both.to(r.dtype.element_ty)
            b_pairs = tl.dot(b_both, tl.trans(b_both), input_precision=PRECISION)
            b_scores += tl.where(joined(o_c, level) & right, b_pairs, 0.0)
            b_from, b_to, b_all = join(b_from, b_to, b_all, level)
        p_state, m_state = numbered_state(states, i_chunk, K, V, o_k, o_v)
        b_state = tl.load(p_state, mask=m_state, other=0.0)
        b_o = tl.dot((b_r * tl.exp2(b_from)).to(r.dtype.element_ty), b_state, b_o, input_precision=PRECISION)
    b_scores += tl.where(o_c[:, None] == o_c[None, :], b_own[:, None], 0.0)
    b_scores = b_scores.to(scores.dtype.element_ty)
    if i_h % PARTS == 0:  # the heads that share keys have the same scores
        tl.store(matrix(scores, (i_b * M + i_m) * G + i_g, BT), b_scores)
    p_v, m_v = rows(v + i_row * V, i_m, T, H * V, o_v, V, BT)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    b_o = tl.dot(b_scores, b_v, b_o, input_precision=PRECISION)
    p_o, m_v = rows(o + i_row * V, i_m, T, H * V, o_v, V, BT)
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
