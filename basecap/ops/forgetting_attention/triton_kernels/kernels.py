"""Attention with forget gates in Triton: which tiles are open, and the forward pass.

Logarithms are of base 2. The sums of decays from the start of a row are kept in two float32 parts, and a decay is only
formed from differences: directly between the tokens of a tile; across tiles, from the query and from the key to a token
between them. Both are rounded by their own size then, and neither is larger than the decay. README.md has the rest.
"""

import triton
import triton.language as tl

from basecap.ops.kernels_shared import add_product, exp2

#: What a computed score may differ from the exact one, as a share of |q| |k|: far more than it does.
SLACK = tl.constexpr(2.0**-9)
#: The same for a decay, as a share of itself.
SLACK_DECAY = tl.constexpr(2.0**-20)
#: 2^x is 0 in float32 for every x below -150.
CLOSED = tl.constexpr(-152.0)


@triton.jit
def rows(p, o_t, stride_t, o_x, T, X: tl.constexpr):
    """Load rows of X numbers, zero where there are none, [BT, BX]."""
    p_x = p + o_t.to(tl.int64)[:, None] * stride_t + o_x[None, :]
    return tl.load(p_x, mask=(o_t < T)[:, None] & (o_x < X)[None, :], other=0.0)


@triton.jit
def parts(p, o_t, T, N, OTHER: tl.constexpr = 0.0):
    """Load the two parts of numbers of tokens, [BT] each; `p` is the head's place in [2, N]. OTHER: behind the end."""
    return tl.load(p + o_t, mask=o_t < T, other=OTHER), tl.load(p + N + o_t, mask=o_t < T, other=0.0)


@triton.jit
def prepare_fwd_kernel(
    p_q, p_k, p_total, p_parts, p_bounds,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, T, N, M, scale2,
    H: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Cut the sums into two parts in base 2; bound what BS tokens give to a score, as queries and as keys.

    `p_bounds` is float64 [5, M tiles of each of N / T heads]: the largest scale |q|, the largest |k|, the largest
    negative score of a query with its own key, the largest and the smallest sum of decays.
    """
    i_s, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_t, o_k = i_s * BS + tl.arange(0, BS), tl.arange(0, BK)
    m_t = o_t < T
    b_q = rows(p_q + i_bh // H * stride_qb + i_bh % H * stride_qh, o_t, stride_qt, o_k, T, K).to(tl.float32)
    b_k = rows(p_k + i_bh // H * stride_kb + i_bh % H * stride_kh, o_t, stride_kt, o_k, T, K).to(tl.float32)
    b_reach = scale2 * tl.sqrt(tl.sum(b_q * b_q, 1))
    b_size = tl.sqrt(tl.sum(b_k * b_k, 1))
    b_own = SLACK * b_reach * b_size - scale2 * tl.sum(b_q * b_k, 1)
    b_total = tl.load(p_total + i_bh * T + o_t, mask=m_t, other=0.0) * 1.4426950408889634
    b_high = b_total.to(tl.float32)
    tl.store(p_parts + i_bh * T + o_t, b_high, mask=m_t)
    tl.store(p_parts + N + i_bh * T + o_t, (b_total - b_high.to(tl.float64)).to(tl.float32), mask=m_t)
    tiles = N // T * M
    p_bounds += i_bh * M + i_s
    tl.store(p_bounds, (tl.max(b_reach, 0) * (1 + SLACK)).to(tl.float64))
    tl.store(p_bounds + tiles, tl.max(b_size, 0).to(tl.float64))
    tl.store(p_bounds + 2 * tiles, tl.max(tl.where(m_t, b_own, float("-inf")), 0).to(tl.float64))
    tl.store(p_bounds + 3 * tiles, tl.max(tl.where(m_t, b_total, float("-inf")), 0))
    tl.store(p_bounds + 4 * tiles, tl.min(tl.where(m_t, b_total, float("inf")), 0))


@triton.jit
def open_fwd_kernel(
    p_bounds, p_starts, p_open, T, M, tiles,
    H: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SKIP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the first tile of keys that a tile of queries has not closed; its own tiles are always open.

    The bound is at least score_ts - score_tt for every query t and key s of the two tiles, rounding errors included.
    Below -150 the weight of s is 2^x = 0 in float32, as softmax has seen the query's own key before, and each sum that
    it is added to stays as it is, bit by bit: nothing else is skipped. README.md has the proof.
    """
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    R: tl.constexpr = BQ // BS
    p_bounds += i_bh * M
    o_r = i_t * R + tl.arange(0, R)
    m_r = o_r < M
    first = i_t * R
    if SKIP:
        reach = tl.max(tl.load(p_bounds + o_r, mask=m_r, other=0.0), 0)
        own = tl.max(tl.load(p_bounds + 2 * tiles + o_r, mask=m_r, other=float("-inf")), 0)
        high = tl.max(tl.load(p_bounds + 3 * tiles + o_r, mask=m_r, other=float("-inf")), 0)
        for at in range(0, i_t * R, BM):
            o_m = at + tl.arange(0, BM)
            m_m = o_m < i_t * R
            b_size = tl.load(p_bounds + tiles + o_m, mask=m_m, other=0.0)
            b_decay = high - tl.load(p_bounds + 4 * tiles + o_m, mask=m_m, other=0.0)
            # Where the bound is no number, the tile is open.
            closed = reach * b_size + own + b_decay + SLACK_DECAY * tl.abs(b_decay) < CLOSED
            if PACKED:
                closed = closed | ((o_m + 1) * BS <= tl.load(p_starts + i_bh // H * T + i_t * BQ))
            first = tl.minimum(first, tl.min(tl.where(closed | ~m_m, first, o_m), 0))
    else:
        first = 0
    tl.store(p_open + i_bh * tl.num_programs(0) + i_t, first)


@triton.jit
def range_fwd_kernel(p_open, p_ranges, MQ, M, R: tl.constexpr, BM: tl.constexpr):
    """Write the first tile of keys of each tile of queries, and behind them the end of the tiles of queries of each.

    No later tile of queries begins before an earlier one, so that both say the same of every pair of tiles.
    """
    i, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, end = tl.cast(M, tl.int32), i // R + 1
    for at in range(0, MQ, BM):
        o_m = at + tl.arange(0, BM)
        b_open = tl.load(p_open + i_bh * MQ + o_m, mask=o_m < MQ, other=M)
        first = tl.minimum(first, tl.min(tl.where(o_m >= i, b_open, M), 0))
        end = tl.maximum(end, tl.max(tl.where(b_open <= i, o_m + 1, 0), 0))
    p_ranges += i_bh * (MQ + M) + i
    tl.store(p_ranges, first, mask=i < MQ)
    tl.store(p_ranges + MQ, end)


@triton.jit
def between(b_high, b_low, b_from_high, b_from_low):
    """Return the differences of sums in two parts."""
    return (b_high - b_from_high) + (b_low - b_from_low)


@triton.jit
def own_scores(b_products, scale2, b_decay, o_t, o_s, b_start, PACKED: tl.constexpr):
    """Return scores of queries with keys of which some are later; arguments broadcast to [BQ, BS] or to [BS, BQ].

    Here and elsewhere a score is one multiply-add: a compiler that chose where to fuse could choose otherwise in each
    kernel, and the weights of both backward kernels would differ in their last bits.
    """
    seen = o_s <= o_t
    if PACKED:
        seen = seen & (o_s >= b_start)
    return tl.where(seen, tl.fma(b_products, scale2, b_decay), float("-inf"))


@triton.jit
def attend_fwd_kernel(
    p_q, p_k, p_v, p_parts, p_starts, p_ranges, p_o, p_lse,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, N, M, scale2,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of BQ queries and logsumexps. From the own keys back: README.md says why."""
    EXACT: tl.constexpr = p_q.dtype.element_ty == tl.float32
    # The last queries have the most keys: they begin first.
    i_t, i_bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    R: tl.constexpr = BQ // BS
    p_k += i_b * stride_kb + i_h * stride_kh
    p_v += i_b * stride_vb + i_h * stride_vh
    p_parts += i_bh * T
    o_t, o_k, o_v = i_t * BQ + tl.arange(0, BQ), tl.arange(0, BK), tl.arange(0, BV)
    m_t = o_t < T
    b_q = rows(p_q + i_b * stride_qb + i_h * stride_qh, o_t, stride_qt, o_k, T, K)
    b_high, b_low = parts(p_parts, o_t, T, N)
    b_start = o_t
    if PACKED:
        b_start = tl.load(p_starts + i_b * T + o_t, mask=m_t, other=0)
    b_o = tl.zeros([BQ, BV], tl.float32)
    b_top = tl.full([BQ], float("-inf"), tl.float32)
    b_mass = tl.zeros([BQ], tl.float32)
    for n in tl.static_range(R):
        o_s = i_t * BQ + (R - 1 - n) * BS + tl.arange(0, BS)
        b_k, b_v = rows(p_k, o_s, stride_kt, o_k, T, K), rows(p_v, o_s, stride_vt, o_v, T, V)
        b_high_s, b_low_s = parts(p_parts, o_s, T, N)
        b_decay = between(b_high[:, None], b_low[:, None], b_high_s[None, :], b_low_s[None, :])
        b_products = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_scores = own_scores(b_products, scale2, b_decay, o_t[:, None], o_s[None, :], b_start[:, None], PACKED)
        b_new = tl.maximum(b_top, tl.max(b_scores, 1))
        # These keys may all be later than a query.
        b_from = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p, b_kept = exp2(b_scores - b_from[:, None], EXACT), exp2(b_top - b_from, EXACT)
        b_o = add_product(b_o * b_kept[:, None], b_p.to(b_v.dtype), b_v, PRECISION)
        b_mass = b_mass * b_kept + tl.sum(b_p, 1)
        b_top = b_new
    # Decays to the keys before this tile are those from its first token on, and those up to there.
    first_high, first_low = tl.load(p_parts + i_t * BQ), tl.load(p_parts + N + i_t * BQ)
    b_since = tl.zeros([BQ], tl.float32) if DIRECT else between(b_high, b_low, first_high, first_low)
    for n in range(i_t * R - tl.load(p_ranges + i_bh * (tl.num_programs(0) + M) + i_t)):
        o_s = i_t * BQ - (n + 1) * BS + tl.arange(0, BS)
        b_k, b_v = rows(p_k, o_s, stride_kt, o_k, T, K), rows(p_v, o_s, stride_vt, o_v, T, V)
        b_high_s, b_low_s = parts(p_parts, o_s, T, N)
        if DIRECT:
            b_until = between(b_high[:, None], b_low[:, None], b_high_s[None, :], b_low_s[None, :])
        else:
            b_until = between(first_high, first_low, b_high_s, b_low_s)[None, :]
        b_scores = tl.fma(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), scale2, b_until)
        if PACKED:
            b_scores = tl.where(o_s[None, :] >= b_start[:, None], b_scores, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_scores, 1) + b_since)
        b_p, b_kept = exp2(b_scores - (b_new - b_since)[:, None], EXACT), exp2(b_top - b_new, EXACT)
        b_o = add_product(b_o * b_kept[:, None], b_p.to(b_v.dtype), b_v, PRECISION)
        b_mass = b_mass * b_kept + tl.sum(b_p, 1)
        b_top = b_new
    b_mass = tl.where(m_t, b_mass, 1.0)
    b_o = tl.div_rn(b_o, b_mass[:, None])
    p_row = ((i_b * T + o_t) * H + i_h)[:, None] * V + o_v[None, :]
    m_o = m_t[:, None] & (o_v < V)[None, :]
    tl.store(p_o + p_row, b_o.to(p_o.dtype.element_ty), mask=m_o)
    b_lse = b_top.to(tl.float64) + tl.log2(b_mass.to(tl.float64))
    b_high = b_lse.to(tl.float32)
    tl.store(p_lse + i_bh * T + o_t, b_high, mask=m_t)
    tl.store(p_lse + N + i_bh * T + o_t, (b_lse - b_high.to(tl.float64)).to(tl.float32), mask=m_t)
