"""The gated delta rule in Triton, forward: the quantities of each chunk, then a loop over the chunks; see README.md.

Tensors: q, k [B, T, H, K]; v, u, o [B, T, H, V]; beta, log_decay [B, T, H]; decays from a chunk's start to a token and
from a token to its end [B, H, T] float32; matrices between the BT tokens of a chunk [B, M, H, BT, BT]; states between
chunks [B, M, H, K, V]; all contiguous. `ids` are the segments [B, T], `log_decay` and `ids` may be None.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_tiles import matrix, rows, state


@triton.jit
def sums(log_decay, i_b, o_t, T, i_h, H):
    """Sums of log decays from the chunk's start to each token: in float64, to keep the digits of weak decays."""
    b_log = tl.load(log_decay + (i_b * T + o_t) * H + i_h, mask=o_t < T, other=0.0)
    return tl.cumsum(b_log.to(tl.float64), 0)


@triton.jit
def within(log_decay, ids, i_b, o_t, T, i_h, H):
    """The decay from token s to token t of one chunk, [t, s]; zero for s > t and across segments."""
    seen = (o_t[:, None] >= o_t[None, :]) & (o_t < T)[:, None]
    if ids is not None:
        b_ids = tl.load(ids + i_b * T + o_t, mask=o_t < T, other=0)
        seen = seen & (b_ids[:, None] == b_ids[None, :])
    b_within = tl.where(seen, 1.0, 0.0)
    if log_decay is not None:
        # Whole numbers and rests: their differences keep the digits of float64 in float32.
        b_sums = sums(log_decay, i_b, o_t, T, i_h, H)
        coarse = tl.floor(b_sums)
        fine = (b_sums - coarse).to(tl.float32)
        coarse = coarse.to(tl.float32)
        exponent = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        b_within *= tl.exp(tl.where(seen, exponent, 0.0))
    return b_within


@triton.jit
def edges(log_decay, ids, i_b, i_m, o_t, T, i_h, H, BT: tl.constexpr):
    """The decays from the chunk's start to each token and from each token to the chunk's end."""
    m_t = o_t < T
    b_from = tl.where(m_t, 1.0, 0.0)
    b_to = b_from
    if log_decay is not None:
        b_sums = sums(log_decay, i_b, o_t, T, i_h, H)
        # Tokens behind the end do not decay: the last sum is that of the last token.
        total = tl.sum(tl.where(o_t == (i_m + 1) * BT - 1, b_sums, 0.0), 0)
        b_from *= tl.exp(b_sums.to(tl.float32))
        b_to *= tl.exp((total - b_sums).to(tl.float32))
    if ids is not None:
        b_ids = tl.load(ids + i_b * T + o_t, mask=m_t, other=0)
        last = tl.minimum((i_m + 1) * BT, T) - 1
        b_from = tl.where(b_ids == tl.load(ids + i_b * T + tl.maximum(i_m * BT - 1, 0)), b_from, 0.0)
        b_to = tl.where(b_ids == tl.load(ids + i_b * T + last), b_to, 0.0)
    return b_from, b_to


@triton.jit
def chunk_fwd_kernel(
    q, k, beta, log_decay, ids, inverse, scores, from_start, to_end,
    T, H, K, M,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Everything about a chunk except its state: the inverse of its triangular system, its scores and its decays."""
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_c = tl.arange(0, BT)
    o_t = i_m * BT + o_c
    b_scores = tl.zeros([BT, BT], dtype=tl.float32)
    b_system = tl.zeros([BT, BT], dtype=tl.float32)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        p_q, m_k = rows(q, i_b, o_t, T, i_h, H, o_k, K)
        p_k, _ = rows(k, i_b, o_t, T, i_h, H, o_k, K)
        b_q = tl.load(p_q, mask=m_k, other=0.0)
        b_k = tl.load(p_k, mask=m_k, other=0.0)
        b_scores += tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_system += tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_within = within(log_decay, ids, i_b, o_t, T, i_h, H)
    tl.store(matrix(scores, i_b, i_m, i_h, M, H, BT), (b_scores * b_within).to(scores.dtype.element_ty))

    b_beta = tl.load(beta + (i_b * T + o_t) * H + i_h, mask=o_t < T, other=0.0).to(tl.float32)
    b_system *= b_within * b_beta[:, None]
    # The inverses of the blocks on the diagonal, of one token, of two, of four, ...: two neighbours A and B with C left
    # of B invert to A^-1, B^-1 and -B^-1 C A^-1 there. Unlike with powers of the matrix nothing grows and cancels.
    b_inverse = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        o_block = o_c // (1 << level)
        left = (o_block[:, None] == o_block[None, :] + 1) & (o_block[:, None] % 2 == 1)
        b_left = tl.where(left, b_system, 0.0)
        if level > 0:
            b_left = tl.dot(tl.dot(b_inverse, b_left, input_precision=EXACT), b_inverse, input_precision=EXACT)
        b_inverse -= b_left
    tl.store(matrix(inverse, i_b, i_m, i_h, M, H, BT), b_inverse.to(inverse.dtype.element_ty))

    b_from, b_to = edges(log_decay, ids, i_b, i_m, o_t, T, i_h, H, BT)
    p_row = (i_b * H + i_h) * T + o_t
    tl.store(from_start + p_row, b_from, mask=o_t < T)
    tl.store(to_end + p_row, b_to, mask=o_t < T)


@triton.jit
def walk_fwd_kernel(
    q, k, v, beta, inverse, scores, from_start, to_end, first, o, u, states, last,
    T, H, K, V, M,
    PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks with BV columns of the state: outputs, or what is written and the states before the chunks.

    `first` may be None for zeros; of `o`, `u` with `states`, and `last`, those are written that are not None.
    """
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k = tl.arange(0, BK)
    b_state = tl.zeros([BK, BV], dtype=tl.float32)
    if first is not None:
        p_first, m_state = state(first, i_b, 0, i_h, 1, H, o_k, K, o_v, V)
        b_state += tl.load(p_first, mask=m_state, other=0.0).to(tl.float32)
    for i_m in range(M):
        o_t = i_m * BT + tl.arange(0, BT)
        m_t = o_t < T
        p_row = (i_b * H + i_h) * T
        p_k, m_k = rows(k, i_b, o_t, T, i_h, H, o_k, K)
        p_v, m_v = rows(v, i_b, o_t, T, i_h, H, o_v, V)
        b_k = tl.load(p_k, mask=m_k, other=0.0)
        b_v = tl.load(p_v, mask=m_v, other=0.0)
        b_inverse = tl.load(matrix(inverse, i_b, i_m, i_h, M, H, BT))
        b_beta = tl.load(beta + (i_b * T + o_t) * H + i_h, mask=m_t, other=0.0).to(tl.float32)
        b_from = tl.load(from_start + p_row + o_t, mask=m_t, other=0.0)
        b_to = tl.load(to_end + p_row + o_t, mask=m_t, other=0.0)
        across = tl.load(from_start + p_row + tl.minimum((i_m + 1) * BT, T) - 1)

        b_low = b_state.to(b_k.dtype)
        if states is not None:
            p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
            tl.store(p_state, b_state, mask=m_state)
        b_kept = tl.dot(b_k, b_low, input_precision=PRECISION) * b_from[:, None]
        b_right = ((b_v - b_kept) * b_beta[:, None]).to(b_k.dtype)
        b_u = tl.dot(b_inverse, b_right, input_precision=PRECISION)
        if u is not None:
            p_u, m_u = rows(u, i_b, o_t, T, i_h, H, o_v, V)
            tl.store(p_u, b_u.to(b_k.dtype), mask=m_u)
        if o is not None:
            p_q, m_q = rows(q, i_b, o_t, T, i_h, H, o_k, K)
            b_q = tl.load(p_q, mask=m_q, other=0.0)
            b_scores = tl.load(matrix(scores, i_b, i_m, i_h, M, H, BT))
            b_o = tl.dot(b_q, b_low, input_precision=PRECISION) * b_from[:, None]
            b_o += tl.dot(b_scores, b_u.to(b_k.dtype), input_precision=PRECISION)
            p_o, m_o = rows(o, i_b, o_t, T, i_h, H, o_v, V)
            tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_o)
        b_stored = (b_u * b_to[:, None]).to(b_k.dtype)
        b_state = tl.dot(tl.trans(b_k), b_stored, b_state * across, input_precision=PRECISION)
    if last is not None:
        p_last, m_state = state(last, i_b, 0, i_h, 1, H, o_k, K, o_v, V)
        tl.store(p_last, b_state, mask=m_state)
