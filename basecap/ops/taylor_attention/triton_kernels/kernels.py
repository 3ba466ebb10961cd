"""Taylor attention in Triton: tiles within long chunks, and one matrix of sums per pair of features between them.

With x' = [x / K^(1/4), 1] the weight is w = (1 + y^2) / 2 at y = q'.k' = 1 + q.k / sqrt(K). README.md has the rest.
Tensors are contiguous: [B, T, H, X], sums [B, H, M, K + 1, K + 1, V + 1].
"""

import triton
import triton.language as tl

from basecap.ops.kernels_shared import add_product


@triton.jit
def _rows(p, o_t, m_t, stride, o_x, X: tl.constexpr):
    """Load rows of X numbers, zero where masked, [BT, BX]."""
    p_x = p + o_t.to(tl.int64)[:, None] * stride + o_x[None, :]
    return tl.load(p_x, mask=m_t[:, None] & (o_x < X)[None, :], other=0.0)


@triton.jit
def _extend(b_x, o_k, K: tl.constexpr, root):
    """Return x' in float32, [BT, BK]."""
    return tl.where(o_k[None, :] == K, 1.0, b_x.to(tl.float32) * root)


@triton.jit
def _sums(p_state, i, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Load the sums of feature pairs (i, j): of values [BK, BV] and of the last column [BK]."""
    p = p_state + (i * (K + 1) + o_k) * (V + 1)
    m_k = o_k <= K
    b_values = tl.load(p[:, None] + o_v[None, :], mask=m_k[:, None] & (o_v < V)[None, :], other=0.0)
    return b_values, tl.load(p + V, mask=m_k, other=0.0)


@triton.jit
def sum_kernel(
    p_x, p_y, p_factor, p_delta, p_state, T, M, root,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WEIGHTED: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum x'_i x'_j [y, 1] over one chunk, for one i; WEIGHTED: factor [y, -delta] instead of [y, 1]."""
    i, i_m, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = (i_bh // H) * T * H + i_bh % H
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_sum = tl.zeros([BK, BV], tl.float32)
    b_last = tl.zeros([BK], tl.float32)
    for at in range(0, CHUNK, BT):
        o_t = i_m * CHUNK + at + tl.arange(0, BT)
        m_t = o_t < T
        b_x = _extend(_rows(p_x + first * K, o_t, m_t, H * K, o_k, K), o_k, K, root)
        b_y = _rows(p_y + first * V, o_t, m_t, H * V, o_v, V).to(tl.float32)
        b_e = m_t.to(tl.float32)
        if WEIGHTED:
            b_factor = tl.load(p_factor + first + o_t.to(tl.int64) * H, mask=m_t, other=0.0)
            b_y *= b_factor[:, None]
            b_e = -b_factor * tl.load(p_delta + first + o_t.to(tl.int64) * H, mask=m_t, other=0.0)
        b_xx = b_x * tl.sum(tl.where(o_k[None, :] == i, b_x, 0.0), 1)[:, None]
        b_sum = tl.dot(tl.trans(b_xx), b_y, b_sum, input_precision=PRECISION)
        b_last += tl.sum(b_xx * b_e[:, None], 0)
    p = p_state + (((i_bh * M + i_m) * (K + 1) + i) * (K + 1) + o_k) * (V + 1)
    m_k = o_k <= K
    tl.store(p[:, None] + o_v[None, :], b_sum, mask=m_k[:, None] & (o_v < V)[None, :])
    tl.store(p + V, b_last, mask=m_k)


@triton.jit
def fwd_kernel(
    p_q, p_k, p_v, p_state, p_o, p_norm, T, M, root, scale, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs and denominators of BT queries; `p_state` holds the sums before each chunk."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_m = i_t * BT // CHUNK
    first = (i_bh // H) * T * H + i_bh % H
    o_t, o_k, o_v = i_t * BT + tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    m_t = o_t < T
    b_q = _rows(p_q + first * K, o_t, m_t, H * K, o_k, K)
    b_o = tl.zeros([BT, BV], tl.float32)
    b_norm = tl.zeros([BT], tl.float32)
    for at in range(i_m * CHUNK, i_t * BT + BT, BT):
        o_s = at + tl.arange(0, BT)
        b_k = _rows(p_k + first * K, o_s, o_s < T, H * K, o_k, K)
        b_v = _rows(p_v + first * V, o_s, o_s < T, H * V, o_v, V)
        b_y = 1.0 + scale * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_w = tl.where(o_s[None, :] <= o_t[:, None], 0.5 + 0.5 * b_y * b_y, 0.0)
        b_o = add_product(b_o, b_w.to(b_v.dtype), b_v, PRECISION)
        b_norm += tl.sum(b_w, 1)
    if i_m > 0:
        p_sums = p_state + (i_bh * M + i_m) * (K + 1) * (K + 1) * (V + 1)
        b_x = _extend(b_q, o_k, K, root)
        for i in range(K + 1):
            b_sum, b_last = _sums(p_sums, i, o_k, o_v, K, V)
            b_half = 0.5 * tl.sum(tl.where(o_k[None, :] == i, b_x, 0.0), 1)
            b_o += b_half[:, None] * tl.dot(b_x, b_sum, input_precision=PRECISION)
            b_norm += b_half * tl.sum(b_x * b_last[None, :], 1)
        # The pair of the two ones counts: sums of the values themselves.
        p_ones = p_sums + ((K + 1) * (K + 1) - 1) * (V + 1)
        b_o += 0.5 * tl.load(p_ones + o_v, mask=o_v < V, other=0.0)[None, :]
        b_norm += 0.5 * tl.load(p_ones + V)
    b_norm += eps
    p_row = first + o_t.to(tl.int64) * H
    # Rounded once: of a first token the output must be the value itself, whose gradients cancel.
    b_o = tl.div_rn(b_o, b_norm[:, None])
    tl.store(
        p_o + p_row[:, None] * V + o_v[None, :],
        b_o.to(p_o.dtype.element_ty),
        mask=m_t[:, None] & (o_v < V)[None, :],
    )
    tl.store(p_norm + p_row, b_norm, mask=m_t)


@triton.jit
def bwd_q_kernel(
    p_q, p_k, p_v, p_o, p_do, p_norm, p_factor, p_delta, p_state, p_dq, T, M, root, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of BT queries; that of w_ts is factor_t (do_t.v_s - delta_t).

    Writes factor, 1 / norm, and delta, do.o, for the kernels that follow.
    """
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_m = i_t * BT // CHUNK
    first = (i_bh // H) * T * H + i_bh % H
    o_t, o_k, o_v = i_t * BT + tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    m_t = o_t < T
    p_row = first + o_t.to(tl.int64) * H
    b_q = _rows(p_q + first * K, o_t, m_t, H * K, o_k, K)
    b_do = _rows(p_do + first * V, o_t, m_t, H * V, o_v, V)
    b_o = _rows(p_o + first * V, o_t, m_t, H * V, o_v, V)
    b_factor = tl.div_rn(1.0, tl.load(p_norm + p_row, mask=m_t, other=1.0))
    # A diagonal, so that it is rounded as do.v_s is: of a first token, whose output is its value, nothing must be left
    # of their difference.
    b_dots = tl.dot(b_do, tl.trans(b_o), input_precision=PRECISION)
    b_delta = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_dots, 0.0), 1)
    tl.store(p_factor + p_row, b_factor, mask=m_t)
    tl.store(p_delta + p_row, b_delta, mask=m_t)
    b_dq = tl.zeros([BT, BK], tl.float32)
    for at in range(i_m * CHUNK, i_t * BT + BT, BT):
        o_s = at + tl.arange(0, BT)
        b_k = _rows(p_k + first * K, o_s, o_s < T, H * K, o_k, K)
        b_v = _rows(p_v + first * V, o_s, o_s < T, H * V, o_v, V)
        b_y = 1.0 + scale * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        # The difference first: the two cancel.
        b_dw = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION) - b_delta[:, None]
        b_dy = tl.where(o_s[None, :] <= o_t[:, None], b_dw * b_factor[:, None] * b_y, 0.0)
        b_dq = add_product(b_dq, b_dy.to(b_k.dtype), b_k, PRECISION)
    b_dq *= scale
    if i_m > 0:
        p_sums = p_state + (i_bh * M + i_m) * (K + 1) * (K + 1) * (V + 1)
        b_x = _extend(b_q, o_k, K, root)
        b_g = b_do.to(tl.float32) * b_factor[:, None]
        b_extra = -b_factor * b_delta
        for i in range(K + 1):
            b_sum, b_last = _sums(p_sums, i, o_k, o_v, K, V)
            b_i = root * tl.sum(tl.where(o_k[None, :] == i, b_x, 0.0), 1)
            b_past = tl.dot(b_g, tl.trans(b_sum), input_precision=PRECISION) + b_extra[:, None] * b_last[None, :]
            b_dq += b_i[:, None] * b_past
    tl.store(
        p_dq + p_row[:, None] * K + o_k[None, :],
        b_dq.to(p_dq.dtype.element_ty),
        mask=m_t[:, None] & (o_k < K)[None, :],
    )


@triton.jit
def bwd_kv_kernel(
    p_q, p_k, p_v, p_do, p_factor, p_delta, p_state, p_dk, p_dv, T, M, root, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of BT keys and values; `p_state` holds the sums over queries after each chunk."""
    i_s, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_m = i_s * BT // CHUNK
    first = (i_bh // H) * T * H + i_bh % H
    o_s, o_k, o_v = i_s * BT + tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    m_s = o_s < T
    b_k = _rows(p_k + first * K, o_s, m_s, H * K, o_k, K)
    b_v = _rows(p_v + first * V, o_s, m_s, H * V, o_v, V)
    b_dk = tl.zeros([BT, BK], tl.float32)
    b_dv = tl.zeros([BT, BV], tl.float32)
    for at in range(i_s * BT, tl.minimum((i_m + 1) * CHUNK, T), BT):
        o_t = at + tl.arange(0, BT)
        m_t = o_t < T
        p_row = first + o_t.to(tl.int64) * H
        b_q = _rows(p_q + first * K, o_t, m_t, H * K, o_k, K)
        b_do = _rows(p_do + first * V, o_t, m_t, H * V, o_v, V)
        b_factor = tl.load(p_factor + p_row, mask=m_t, other=0.0)
        b_delta = tl.load(p_delta + p_row, mask=m_t, other=0.0)
        seen = (o_t[None, :] >= o_s[:, None]) & m_t[None, :]
        b_y = 1.0 + scale * tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        b_w = tl.where(seen, (0.5 + 0.5 * b_y * b_y) * b_factor[None, :], 0.0)
        b_dv = add_product(b_dv, b_w.to(b_do.dtype), b_do, PRECISION)
        b_dw = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION) - b_delta[None, :]
        b_dy = tl.where(seen, b_dw * b_factor[None, :] * b_y, 0.0)
        b_dk = add_product(b_dk, b_dy.to(b_q.dtype), b_q, PRECISION)
    b_dk *= scale
    if i_m < M - 1:
        p_sums = p_state + (i_bh * M + i_m) * (K + 1) * (K + 1) * (V + 1)
        b_x = _extend(b_k, o_k, K, root)
        b_value = b_v.to(tl.float32)
        for i in range(K + 1):
            b_sum, b_last = _sums(p_sums, i, o_k, o_v, K, V)
            b_i = tl.sum(tl.where(o_k[None, :] == i, b_x, 0.0), 1)
            b_dv += 0.5 * b_i[:, None] * tl.dot(b_x, b_sum, input_precision=PRECISION)
            b_future = tl.dot(b_value, tl.trans(b_sum), input_precision=PRECISION) + b_last[None, :]
            b_dk += root * b_i[:, None] * b_future
        p_ones = p_sums + ((K + 1) * (K + 1) - 1) * (V + 1)
        b_dv += 0.5 * tl.load(p_ones + o_v, mask=o_v < V, other=0.0)[None, :]
    p_row = first + o_s.to(tl.int64) * H
    tl.store(
        p_dk + p_row[:, None] * K + o_k[None, :],
        b_dk.to(p_dk.dtype.element_ty),
        mask=m_s[:, None] & (o_k < K)[None, :],
    )
    tl.store(
        p_dv + p_row[:, None] * V + o_v[None, :],
        b_dv.to(p_dv.dtype.element_ty),
        mask=m_s[:, None] & (o_v < V)[None, :],
    )
