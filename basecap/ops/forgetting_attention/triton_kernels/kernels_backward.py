"""The backward pass: gradients of queries by one kernel, of keys and values by another; each recomputes the weights.

The scores of keys are held transposed, [keys, queries], so that no operand of a product is a product transposed.
"""

import triton
import triton.language as tl

from basecap.ops.forgetting_attention.triton_kernels.kernels import between, own_scores, parts, rows
from basecap.ops.kernels_shared import add_product, exp2


@triton.jit
def against_own(
    b_q, b_do, b_lse, b_high, b_low, b_start, o_t, p_k, p_v, p_parts, stride_kt, stride_vt, at, T, N, scale2,
    K: tl.constexpr, V: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the weights of BS keys from `at` on, of which some are later, the weights' gradients, and the keys."""
    o_s = at + tl.arange(0, BS)
    b_k = rows(p_k, o_s, stride_kt, tl.arange(0, BK), T, K)
    b_v = rows(p_v, o_s, stride_vt, tl.arange(0, BV), T, V)
    b_high_s, b_low_s = parts(p_parts, o_s, T, N)
    b_decay = between(b_high[:, None], b_low[:, None], b_high_s[None, :], b_low_s[None, :])
    b_products = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_scores = own_scores(b_products, scale2, b_decay, o_t[:, None], o_s[None, :], b_start[:, None], PACKED)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    return exp2(b_scores - b_lse[:, None], b_q.dtype == tl.float32), b_dp, b_k


@triton.jit
def against_earlier(
    b_q, b_do, b_shift, b_high, b_low, b_start, first_high, first_low, p_k, p_v, p_parts, stride_kt, stride_vt,
    at, T, N, scale2, K: tl.constexpr, V: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the same for keys that are all earlier; `b_shift` is the logsumexp minus the decay from `first` on."""
    o_s = at + tl.arange(0, BS)
    b_k = rows(p_k, o_s, stride_kt, tl.arange(0, BK), T, K)
    b_v = rows(p_v, o_s, stride_vt, tl.arange(0, BV), T, V)
    b_high_s, b_low_s = parts(p_parts, o_s, T, N)
    if DIRECT:
        b_until = between(b_high[:, None], b_low[:, None], b_high_s[None, :], b_low_s[None, :])
    else:
        b_until = between(first_high, first_low, b_high_s, b_low_s)[None, :]
    b_scores = tl.fma(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), scale2, b_until)
    if PACKED:
        b_scores = tl.where(o_s[None, :] >= b_start[:, None], b_scores, float("-inf"))
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    return exp2(b_scores - b_shift[:, None], b_q.dtype == tl.float32), b_dp, b_k


@triton.jit
def queries_bwd_kernel(
    p_q, p_k, p_v, p_parts, p_starts, p_ranges, p_lse, p_do, p_dq, p_delta, p_rows,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, N, M,
    scale, scale2, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, MEANS: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """MEANS: of the gradients of BQ queries' weights. Else, from them: gradients of queries, and of scores over keys.

    Two launches, as both in one take more memory on the chip than some cards have. A mean is summed with the very
    weights and gradients from which it is then subtracted: where the gates have closed, little remains. do . o has
    the error of weights rounded to 16 bits.
    """
    i_t, i_bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    R: tl.constexpr = BQ // BS
    p_k += i_b * stride_kb + i_h * stride_kh
    p_v += i_b * stride_vb + i_h * stride_vh
    p_parts += i_bh * T
    o_t, o_k, o_v = i_t * BQ + tl.arange(0, BQ), tl.arange(0, BK), tl.arange(0, BV)
    m_t = o_t < T
    b_q = rows(p_q + i_b * stride_qb + i_h * stride_qh, o_t, stride_qt, o_k, T, K)
    b_do = rows(p_do + (i_b * T * H + i_h) * V, o_t, H * V, o_v, T, V)
    b_start = o_t
    if PACKED:
        b_start = tl.load(p_starts + i_b * T + o_t, mask=m_t, other=0)
    b_lse, b_lse_low = parts(p_lse + i_bh * T, o_t, T, N, float("inf"))
    b_high, b_low = parts(p_parts, o_t, T, N)
    first_high, first_low = tl.load(p_parts + i_t * BQ), tl.load(p_parts + N + i_t * BQ)
    b_low -= b_lse_low
    b_shift = b_lse if DIRECT else b_lse - between(b_high, b_low, first_high, first_low)
    earlier = i_t * R - tl.load(p_ranges + i_bh * (tl.num_programs(0) + M) + i_t)
    if MEANS:
        b_mean = tl.zeros([BQ], p_rows.dtype.element_ty)
        for n in tl.static_range(R):
            b_p, b_dp, _ = against_own(
                b_q, b_do, b_lse, b_high, b_low, b_start, o_t, p_k, p_v, p_parts, stride_kt, stride_vt,
                i_t * BQ + (R - 1 - n) * BS, T, N, scale2, K, V, BS, BK, BV, PACKED, PRECISION,
            )  # fmt: skip
            b_mean += tl.sum((b_p * b_dp).to(b_mean.dtype), 1)
        for n in range(earlier):
            b_p, b_dp, _ = against_earlier(
                b_q, b_do, b_shift, b_high, b_low, b_start, first_high, first_low, p_k, p_v, p_parts, stride_kt,
                stride_vt, i_t * BQ - (n + 1) * BS, T, N, scale2, K, V, BS, BK, BV, PACKED, DIRECT, PRECISION,
            )  # fmt: skip
            b_mean += tl.sum((b_p * b_dp).to(b_mean.dtype), 1)
        tl.store(p_delta + i_bh * T + o_t, b_mean.to(tl.float32), mask=m_t)
    else:
        b_delta = tl.load(p_delta + i_bh * T + o_t, mask=m_t, other=0.0)
        b_dq = tl.zeros([BQ, BK], tl.float32)
        b_row = tl.zeros([BQ], p_rows.dtype.element_ty)
        for n in tl.static_range(R):
            b_p, b_dp, b_k = against_own(
                b_q, b_do, b_lse, b_high, b_low, b_start, o_t, p_k, p_v, p_parts, stride_kt, stride_vt,
                i_t * BQ + (R - 1 - n) * BS, T, N, scale2, K, V, BS, BK, BV, PACKED, PRECISION,
            )  # fmt: skip
            b_ds = b_p * (b_dp - b_delta[:, None])
            b_dq = add_product(b_dq, b_ds.to(b_k.dtype), b_k, PRECISION)
            b_row += tl.sum(b_ds.to(b_row.dtype), 1)
        for n in range(earlier):
            b_p, b_dp, b_k = against_earlier(
                b_q, b_do, b_shift, b_high, b_low, b_start, first_high, first_low, p_k, p_v, p_parts, stride_kt,
                stride_vt, i_t * BQ - (n + 1) * BS, T, N, scale2, K, V, BS, BK, BV, PACKED, DIRECT, PRECISION,
            )  # fmt: skip
            b_ds = b_p * (b_dp - b_delta[:, None])
            b_dq = add_product(b_dq, b_ds.to(b_k.dtype), b_k, PRECISION)
            b_row += tl.sum(b_ds.to(b_row.dtype), 1)
        p_row = ((i_b * T + o_t) * H + i_h)[:, None] * K + o_k[None, :]
        tl.store(p_dq + p_row, (b_dq * scale).to(p_dq.dtype.element_ty), mask=m_t[:, None] & (o_k < K)[None, :])
        tl.store(p_rows + i_bh * T + o_t, b_row, mask=m_t)


@triton.jit
def keys_bwd_kernel(
    p_q, p_k, p_v, p_parts, p_starts, p_ranges, p_lse, p_do, p_delta, p_dk, p_dv, p_columns,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, N, MQ,
    scale, scale2, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of BS keys and values, and the sums of the scores' gradients over queries, BS at a time."""
    EXACT: tl.constexpr = p_q.dtype.element_ty == tl.float32
    i_s, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    p_q += i_b * stride_qb + i_h * stride_qh
    p_do += (i_b * T * H + i_h) * V
    p_parts += i_bh * T
    p_lse += i_bh * T
    p_delta += i_bh * T
    o_s, o_k, o_v = i_s * BS + tl.arange(0, BS), tl.arange(0, BK), tl.arange(0, BV)
    m_s = o_s < T
    b_k = rows(p_k + i_b * stride_kb + i_h * stride_kh, o_s, stride_kt, o_k, T, K)
    b_v = rows(p_v + i_b * stride_vb + i_h * stride_vh, o_s, stride_vt, o_v, T, V)
    b_high, b_low = parts(p_parts, o_s, T, N)
    # The queries of the same tokens. Those behind the end have no weight: their logsumexp is infinite.
    b_q, b_do = rows(p_q, o_s, stride_qt, o_k, T, K), rows(p_do, o_s, H * V, o_v, T, V)
    b_lse, b_lse_low = parts(p_lse, o_s, T, N, float("inf"))
    b_start = o_s
    if PACKED:
        p_starts += i_b * T
        b_start = tl.load(p_starts + o_s, mask=m_s, other=0)
    b_own = between(b_high[None, :], (b_low - b_lse_low)[None, :], b_high[:, None], b_low[:, None])
    b_products = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_scores = own_scores(b_products, scale2, b_own, o_s[None, :], o_s[:, None], b_start[None, :], PACKED)
    b_p = exp2(b_scores - b_lse[None, :], EXACT)
    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, input_precision=PRECISION)
    b_delta = tl.load(p_delta + o_s, mask=m_s, other=0.0)
    b_ds = b_p * (tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION) - b_delta[None, :])
    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, input_precision=PRECISION)
    b_column = tl.sum(b_ds.to(p_columns.dtype.element_ty), 1)
    # Decays to later queries are those up to the last of these tokens, and those from there on.
    last = tl.minimum(i_s * BS + BS, T) - 1
    last_high, last_low = tl.load(p_parts + last), tl.load(p_parts + N + last)
    b_until = between(last_high, last_low, b_high, b_low)
    end = tl.load(p_ranges + i_bh * (MQ + tl.num_programs(0)) + MQ + i_s) * BQ
    for at in range((i_s + 1) * BS, tl.minimum(end, T), BS):
        o_t = at + tl.arange(0, BS)
        b_q, b_do = rows(p_q, o_t, stride_qt, o_k, T, K), rows(p_do, o_t, H * V, o_v, T, V)
        b_lse, b_lse_low = parts(p_lse, o_t, T, N, float("inf"))
        b_high_t, b_low_t = parts(p_parts, o_t, T, N)
        b_low_t -= b_lse_low
        if DIRECT:
            b_decay = between(b_high_t[None, :], b_low_t[None, :], b_high[:, None], b_low[:, None])
        else:
            b_decay = b_until[:, None]
            b_lse -= between(b_high_t, b_low_t, last_high, last_low)
        b_scores = tl.fma(tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION), scale2, b_decay)
        if PACKED:
            b_start = tl.load(p_starts + o_t, mask=o_t < T, other=0)
            b_scores = tl.where(o_s[:, None] >= b_start[None, :], b_scores, float("-inf"))
        b_p = exp2(b_scores - b_lse[None, :], EXACT)
        b_dv = add_product(b_dv, b_p.to(b_do.dtype), b_do, PRECISION)
        b_delta = tl.load(p_delta + o_t, mask=o_t < T, other=0.0)
        b_ds = b_p * (tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION) - b_delta[None, :])
        b_dk = add_product(b_dk, b_ds.to(b_q.dtype), b_q, PRECISION)
        b_column += tl.sum(b_ds.to(b_column.dtype), 1)
    p_row = ((i_b * T + o_s) * H + i_h)[:, None]
    m_k, m_v = m_s[:, None] & (o_k < K)[None, :], m_s[:, None] & (o_v < V)[None, :]
    tl.store(p_dk + p_row * K + o_k[None, :], (b_dk * scale).to(p_dk.dtype.element_ty), mask=m_k)
    tl.store(p_dv + p_row * V + o_v[None, :], b_dv.to(p_dv.dtype.element_ty), mask=m_v)
    tl.store(p_columns + i_bh * T + o_s, b_column, mask=m_s)
