"""Scores of all pairs of some queries with the tokens before them, and the choice of the largest, in Triton.

Scores are of `Q` queries from token `first` on, of rows from `row` on: float32 [rows, Q, T], written in tiles. Tiles
that no query sees are not written, and no kernel reads numbers of tokens that its query does not see. Tensors are
contiguous. `row` differs from launch to launch, and no kernel is compiled anew for it.
"""

import triton
import triton.language as tl

#: The smallest integer of 32 bits.
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def rows(p, o_t, stride, o_x, T, X: tl.constexpr):
    """Load rows of X numbers, zero where there are none, [BT, BX]."""
    p_x = p + o_t.to(tl.int64)[:, None] * stride + o_x[None, :]
    return tl.load(p_x, mask=(o_t < T)[:, None] & (o_x < X)[None, :], other=0.0)


@triton.jit
def visible(o_t, o_s, p_starts, p_chosen, i_b, T, PACKED: tl.constexpr, CHOSEN: tl.constexpr):
    """Return whether queries see tokens, [BQ, BS]; CHOSEN: those that they have chosen."""
    seen = (o_s[None, :] <= o_t[:, None]) & (o_t < T)[:, None]
    if PACKED:
        b_start = tl.load(p_starts + i_b * T + o_t, mask=o_t < T, other=0)
        seen = seen & (o_s[None, :] >= b_start[:, None])
    if CHOSEN:
        p_pair = p_chosen + (i_b * T + o_t)[:, None] * T + o_s[None, :]
        seen = seen & tl.load(p_pair, mask=seen, other=0).to(tl.int1)
    return seen


@triton.jit
def pairs(p, i, at, Q, T, o_r, o_s):
    """Return the addresses of pairs of the i-th row: of queries from the slice's `at`-th on, with tokens [BQ, BS]."""
    return p + (i * Q + at) * T + o_r[:, None] * T + o_s[None, :]


@triton.jit(do_not_specialize=["row"])
def index_fwd_kernel(
    p_q, p_k, p_weights, p_scores, T, row, first, Q,
    X: tl.constexpr, K: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Index scores of a tile of pairs."""
    i_s, i_t, i = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if i_s * BS > first + i_t * BQ + BQ - 1:
        return
    i_b = row + i
    o_r, o_s, o_k = tl.arange(0, BQ), i_s * BS + tl.arange(0, BS), tl.arange(0, BK)
    o_t = first + i_t * BQ + o_r
    b_k = rows(p_k + i_b * T * K, o_s, K, o_k, T, K)
    b_scores = tl.zeros([BQ, BS], tl.float32)
    for x in range(X):
        b_q = rows(p_q + (i_b * T * X + x) * K, o_t, X * K, o_k, T, K)
        b_weight = tl.load(p_weights + (i_b * T + o_t) * X + x, mask=o_t < T, other=0.0).to(tl.float32)
        b_products = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_scores += b_weight[:, None] * tl.maximum(b_products, 0.0)
    m_pair = (o_t < first + Q)[:, None] & (o_s < T)[None, :]
    tl.store(pairs(p_scores, i, i_t * BQ, Q, T, o_r, o_s), b_scores, mask=m_pair)


@triton.jit(do_not_specialize=["row"])
def norm_fwd_kernel(
    p_q, p_k, p_starts, p_chosen, p_norm, T, N, row, first, Q, scale2,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, CHOSEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest score of each query of a head, in base 2, and one over the sum of the exponentials from there.

    `p_norm` is float32 [2, rows, H, Q], N numbers each.
    """
    # The last queries see the most tokens: they begin first.
    i_t, i_h, i = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b = row + i
    o_t, o_k = first + i_t * BQ + tl.arange(0, BQ), tl.arange(0, BK)
    b_q = rows(p_q + (i_b * T * H + i_h) * K, o_t, H * K, o_k, T, K)
    p_k += (i_b * T * (H // GROUP) + i_h // GROUP) * K
    b_top = tl.full([BQ], float("-inf"), tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    for at in range(0, tl.minimum(first + i_t * BQ + BQ, T), BS):
        o_s = at + tl.arange(0, BS)
        b_k = rows(p_k, o_s, H // GROUP * K, o_k, T, K)
        b_scores = scale2 * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_scores = tl.where(visible(o_t, o_s, p_starts, p_chosen, i_b, T, PACKED, CHOSEN), b_scores, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_scores, 1))
        # None of these tokens may be seen.
        b_from = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp2(b_top - b_from) + tl.sum(tl.exp2(b_scores - b_from[:, None]), 1)
        b_top = b_new
    m_t = (o_t < first + Q) & (o_t < T)
    p_norm += (i * H + i_h) * Q + o_t - first
    tl.store(p_norm, b_top, mask=m_t)
    tl.store(p_norm + N, tl.div_rn(1.0, tl.where(m_t, b_sum, 1.0)), mask=m_t)


@triton.jit(do_not_specialize=["row"])
def mass_fwd_kernel(
    p_q, p_k, p_starts, p_chosen, p_norm, p_mass, T, N, row, first, Q, scale2,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, CHOSEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The mean over the heads of the attention distribution, of a tile of pairs."""
    i_s, i_t, i = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if i_s * BS > first + i_t * BQ + BQ - 1:
        return
    i_b = row + i
    G: tl.constexpr = H // GROUP
    o_r, o_s, o_k = tl.arange(0, BQ), i_s * BS + tl.arange(0, BS), tl.arange(0, BK)
    o_t = first + i_t * BQ + o_r
    m_t = (o_t < first + Q) & (o_t < T)
    b_mass = tl.zeros([BQ, BS], tl.float32)
    for h in range(H):
        b_q = rows(p_q + (i_b * T * H + h) * K, o_t, H * K, o_k, T, K)
        b_k = rows(p_k + (i_b * T * G + h // GROUP) * K, o_s, G * K, o_k, T, K)
        p_head = p_norm + (i * H + h) * Q + o_t - first
        b_top, b_over = tl.load(p_head, mask=m_t, other=0.0), tl.load(p_head + N, mask=m_t, other=0.0)
        b_scores = scale2 * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_mass += tl.exp2(b_scores - b_top[:, None]) * b_over[:, None]
    seen = visible(o_t, o_s, p_starts, p_chosen, i_b, T, PACKED, CHOSEN)
    m_pair = m_t[:, None] & (o_s < T)[None, :]
    tl.store(pairs(p_mass, i, i_t * BQ, Q, T, o_r, o_s), tl.where(seen, b_mass / H, 0.0), mask=m_pair)


@triton.jit
def whole_rows(p_starts, o_t, o_s, i_b, T, end, PACKED: tl.constexpr):
    """Return what queries before `end` see of all tokens, [BQ, BT]."""
    seen = (o_s[None, :] <= o_t[:, None]) & (o_t < end)[:, None]
    if PACKED:
        seen = seen & (o_s[None, :] >= tl.load(p_starts + i_b * T + o_t, mask=o_t < end, other=0)[:, None])
    return seen


@triton.jit(do_not_specialize=["row"])
def choose_fwd_kernel(
    p_scores, p_starts, p_chosen, T, row, first, Q, top, BQ: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Write whether BQ queries read each token: the `top` largest scores seen, of equal ones the latest.

    Scores are compared as integers of the same order. The least of the largest is found bit by bit, by counting.
    """
    at, i = tl.program_id(0) * BQ, tl.program_id(1).to(tl.int64)
    i_b = row + i
    o_r, o_s = tl.arange(0, BQ), tl.arange(0, BT)
    o_t = first + at + o_r
    seen = whole_rows(p_starts, o_t, o_s, i_b, T, first + Q, PACKED)
    b_scores = tl.load(pairs(p_scores, i, at, Q, T, o_r, o_s), mask=seen, other=0.0)
    b_scores = tl.where(b_scores == 0.0, 0.0, b_scores)  # a zero has no sign
    b_bits = b_scores.to(tl.int32, bitcast=True)
    b_keys = tl.where(seen, tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits), LOWEST)
    b_least = tl.where(tl.sum((b_keys >= 0).to(tl.int32), 1) >= top, 0, LOWEST)
    for n in range(31):
        b_higher = b_least + (tl.full([BQ], 1, tl.int32) << (30 - n))
        enough = tl.sum((b_keys >= b_higher[:, None]).to(tl.int32), 1) >= top
        b_least = tl.where(enough, b_higher, b_least)
    above, equal = b_keys > b_least[:, None], ((b_keys == b_least[:, None]) & seen).to(tl.int32)
    b_later = tl.sum(equal, 1)[:, None] - tl.cumsum(equal, 1)
    b_missing = top - tl.sum(above.to(tl.int32), 1)
    read = above | ((equal > 0) & (b_later < b_missing[:, None]))
    m_pair = (o_t < first + Q)[:, None] & (o_s < T)[None, :]
    tl.store(pairs(p_chosen, i_b, first + at, T, T, o_r, o_s), read, mask=m_pair)
