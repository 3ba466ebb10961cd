"""Triton kernels of Top-1 element selection: the best key of each query, its value, and the values' gradient."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N", "LENGTH"])
def choose_kernel(
    p_q,
    p_k,
    p_first,
    p_choice,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kg,
    N,
    LENGTH,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
):
    """Write the row of the key first <= s <= t with the highest score, the earliest among equals.

    Where p_first is None, all sequences have LENGTH tokens.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    o_t = tile * BQ + tl.arange(0, BQ)
    h = tl.program_id(1).to(tl.int64)
    g = h // GROUP
    o_k = tl.arange(0, BK)
    m_t = o_t < N
    if p_first is None:
        first = o_t // LENGTH * LENGTH
    else:
        first = tl.load(p_first + o_t, m_t, other=N)
    b_q = tl.load(
        p_q + o_t.to(tl.int64)[:, None] * stride_qt + h * stride_qh + o_k,
        m_t[:, None] & (o_k[None, :] < K),
        other=0.0,
    )
    best = tl.full([BQ], float("-inf"), tl.float32)
    choice = tl.minimum(first, N - 1)
    for at in range(tl.min(first, 0), tl.minimum(tile * BQ + BQ, N), BN):
        o_s = at + tl.arange(0, BN)
        b_k = tl.load(
            p_k + o_s.to(tl.int64)[None, :] * stride_kt + g * stride_kg + o_k[:, None],
            (o_k[:, None] < K) & (o_s[None, :] < N),
            other=0.0,
        )
        s = tl.dot(b_q, b_k, input_precision="ieee")
        visible = (o_s[None, :] <= o_t[:, None]) & (o_s[None, :] >= first[:, None])
        s = tl.where(visible, s, float("-inf"))
        top = tl.max(s, 1)
        where = tl.min(tl.where(s == top[:, None], o_s[None, :], 2147483647), 1)
        choice = tl.where(top > best, where, choice)
        best = tl.maximum(top, best)
    tl.store(p_choice + o_t.to(tl.int64) * H + h, choice, m_t)


@triton.jit(do_not_specialize=["pairs"])
def gather_kernel(
    p_v,
    p_choice,
    p_o,
    stride_vt,
    stride_vg,
    pairs,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BM: tl.constexpr,
):
    """Write the values of BM pairs of a query and a head."""
    i = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_k = tl.arange(0, BK)
    choice = tl.load(p_choice + i, i < pairs, other=0).to(tl.int64)
    p = p_v + (choice * stride_vt + i % H // GROUP * stride_vg)[:, None] + o_k
    mask = (i < pairs)[:, None] & (o_k[None, :] < K)
    tl.store(p_o + i[:, None] * K + o_k, tl.load(p, mask, other=0.0), mask)


@triton.jit(do_not_specialize=["N", "M"], do_not_specialize_on_alignment=["p_offset"])
def scatter_kernel(
    p_do,
    p_choice,
    p_offset,
    p_list,
    p_dv,
    N,
    M,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
):
    """Write dv of BN keys: the sum of do over the queries in their list, each row to its own key."""
    m = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    pairs = tl.cast(N, tl.int64) * GROUP
    o_s = m * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    dv = tl.zeros([BN, BK], tl.float32)
    stop = tl.load(p_offset + g * (M + 1) + m + 1)
    for at in range(tl.load(p_offset + g * (M + 1) + m), stop, BM):
        o_i = at + tl.arange(0, BM)
        query = tl.load(p_list + g * pairs + o_i, o_i < stop, other=0).to(tl.int64)
        chosen = tl.load(p_choice + query, o_i < stop, other=-1)
        b_do = tl.load(p_do + query[:, None] * K + o_k, (o_i < stop)[:, None] & (o_k[None, :] < K), other=0.0)
        one_hot = (o_s[:, None] == chosen[None, :]).to(b_do.dtype)
        dv = tl.dot(one_hot, b_do, dv, input_precision="ieee")
    o = (o_s.to(tl.int64)[:, None] * G + g) * K + o_k
    tl.store(p_dv + o, dv.to(p_dv.dtype.element_ty), (o_s[:, None] < N) & (o_k[None, :] < K))
