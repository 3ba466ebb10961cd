"""The indexer's loss in Triton: rows of scores and of mass to divergences, and from there to gradients.

The gradient of a query's divergence with respect to its scores is softmax(scores) - mass. It takes the place of the
scores, and is zero for earlier tokens that a query does not see.
"""

import triton
import triton.language as tl

from basecap.ops.kernels_shared import add_product
from basecap.ops.token_choice.triton_kernels.kernels import pairs, rows, whole_rows


@triton.jit(do_not_specialize=["row"])
def divergence_fwd_kernel(
    p_scores, p_mass, p_starts, p_chosen, p_loss, T, row, first, Q, BQ: tl.constexpr, BT: tl.constexpr,
    PACKED: tl.constexpr, CHOSEN: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """The divergences of BQ queries, and with LEARN their gradients."""
    at, i = tl.program_id(0) * BQ, tl.program_id(1).to(tl.int64)
    i_b = row + i
    o_r, o_s = tl.arange(0, BQ), tl.arange(0, BT)
    o_t = first + at + o_r
    m_t = o_t < first + Q
    seen = whole_rows(p_starts, o_t, o_s, i_b, T, first + Q, PACKED)
    if CHOSEN:
        p_read = pairs(p_chosen, i_b, first + at, T, T, o_r, o_s)
        seen = seen & tl.load(p_read, mask=seen, other=0).to(tl.int1)
    p_score, p_weight = pairs(p_scores, i, at, Q, T, o_r, o_s), pairs(p_mass, i, at, Q, T, o_r, o_s)
    b_logarithms = tl.load(p_score, mask=seen, other=float("-inf"))
    b_mass = tl.load(p_weight, mask=seen, other=0.0)
    b_logarithms -= tl.where(m_t, tl.max(b_logarithms, 1), 0.0)[:, None]
    b_logarithms -= tl.log(tl.where(m_t, tl.sum(tl.exp(b_logarithms), 1), 1.0))[:, None]
    b_entropy = b_mass * tl.log(tl.where(b_mass > 0.0, b_mass, 1.0))
    b_loss = tl.sum(b_entropy - b_mass * tl.where(seen, b_logarithms, 0.0), 1)
    tl.store(p_loss + i_b * T + o_t, b_loss, mask=m_t)
    if LEARN:
        earlier = (o_s[None, :] <= o_t[:, None]) & m_t[:, None]
        tl.store(p_score, tl.exp(b_logarithms) - b_mass, mask=earlier)


@triton.jit(do_not_specialize=["row"])
def queries_bwd_kernel(
    p_q, p_k, p_weights, p_dscores, p_dq, p_dweights, T, row, first, Q,
    X: tl.constexpr, K: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of BQ queries of one head, and of its weights."""
    i_x, i_t, i = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b = row + i
    o_r, o_k = tl.arange(0, BQ), tl.arange(0, BK)
    o_t = first + i_t * BQ + o_r
    m_t = (o_t < first + Q) & (o_t < T)
    b_q = rows(p_q + (i_b * T * X + i_x) * K, o_t, X * K, o_k, T, K)
    b_dq = tl.zeros([BQ, BK], tl.float32)
    b_dweight = tl.zeros([BQ], tl.float32)
    for at in range(0, tl.minimum(first + i_t * BQ + BQ, T), BS):
        o_s = at + tl.arange(0, BS)
        b_k = rows(p_k + i_b * T * K, o_s, K, o_k, T, K)
        m_pair = m_t[:, None] & (o_s[None, :] <= o_t[:, None])
        b_dscores = tl.load(pairs(p_dscores, i, i_t * BQ, Q, T, o_r, o_s), mask=m_pair, other=0.0)
        b_products = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_dweight += tl.sum(b_dscores * tl.maximum(b_products, 0.0), 1)
        b_open = tl.where(b_products > 0.0, b_dscores, 0.0)
        b_dq = add_product(b_dq, b_open, b_k.to(tl.float32), WIDE)
    p_head = (i_b * T + o_t) * X + i_x
    b_weight = tl.load(p_weights + p_head, mask=m_t, other=0.0).to(tl.float32)
    tl.store(p_dweights + p_head, b_dweight, mask=m_t)
    m_q = m_t[:, None] & (o_k < K)[None, :]
    tl.store(p_dq + p_head[:, None] * K + o_k[None, :], b_weight[:, None] * b_dq, mask=m_q)


@triton.jit(do_not_specialize=["row"])
def keys_bwd_kernel(
    p_q, p_k, p_weights, p_dscores, p_dk, T, row, first, Q,
    X: tl.constexpr, K: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of BS keys what these queries give."""
    i_s, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b = row + i
    o_r, o_s, o_k = tl.arange(0, BQ), i_s * BS + tl.arange(0, BS), tl.arange(0, BK)
    b_k = rows(p_k + i_b * T * K, o_s, K, o_k, T, K)
    p_rows = p_dk + (i_b * T + o_s)[:, None] * K + o_k[None, :]
    m_k = (o_s < T)[:, None] & (o_k < K)[None, :]
    b_dk = tl.load(p_rows, mask=m_k, other=0.0)
    # From the tile on in which the first of the keys is.
    begin = tl.maximum(first, first + (i_s * BS - first) // BQ * BQ)
    for at in range(begin, first + Q, BQ):
        o_t = at + o_r
        m_t = (o_t < first + Q) & (o_t < T)
        m_pair = m_t[:, None] & (o_s[None, :] <= o_t[:, None])
        b_dscores = tl.trans(tl.load(pairs(p_dscores, i, at - first, Q, T, o_r, o_s), mask=m_pair, other=0.0))
        for x in range(X):
            b_q = rows(p_q + (i_b * T * X + x) * K, o_t, X * K, o_k, T, K)
            b_weight = tl.load(p_weights + (i_b * T + o_t) * X + x, mask=m_t, other=0.0).to(tl.float32)
            b_products = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            b_open = tl.where(b_products > 0.0, b_dscores * b_weight[None, :], 0.0)
            b_dk = add_product(b_dk, b_open, b_q.to(tl.float32), WIDE)
    tl.store(p_rows, b_dk, mask=m_k)
