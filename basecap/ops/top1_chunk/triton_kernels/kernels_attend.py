"""Triton kernels of the attention passes: one program for a chunk's keys, its own queries and those that chose it.

Every query has 1 + REMOTE partial results, one for each chunk it attends ("slots": 0 is the own chunk), times C / BN
where a chunk is cut into blocks of keys. They are merged by their logsumexp, in base 2.
"""

import triton
import triton.language as tl

from basecap.ops.kernels_shared import add_product, exp2, log2


@triton.jit
def find_work(p_grid, p_share, p_chunk, g, item, M, EXTRA):
    """Return chunk, share, start and end of a work item; start == end where there is nothing to do.

    Items 0..M-1 are the chunks with the first share of their list, the next ones the extra shares of long lists.
    """
    chunk = item
    share = 0
    if item >= M:
        extra = item - M
        if extra < tl.load(p_share + g * (M + 1) + M):
            chunk = tl.load(p_chunk + g * EXTRA + extra)
            share = 1 + extra - tl.load(p_share + g * (M + 1) + chunk)
        else:
            chunk = -1
    start = tl.load(p_grid + 3 * chunk, chunk >= 0, other=0)
    end = tl.load(p_grid + 3 * chunk + 1, chunk >= 0, other=0)
    return chunk, share, start, end


@triton.jit
def forward_tile(b_q, b_k, b_v, visible, scale2, MASK: tl.constexpr):
    """Return the normalised output [BM, BK] and the base-2 logsumexp [BM] of queries against a block of keys."""
    s = tl.dot(b_q, b_k, input_precision="ieee") * scale2
    if MASK:
        s = tl.where(visible, s, float("-inf"))
        top = tl.max(s, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
    else:
        top = tl.max(s, 1)
    p = exp2(s - top[:, None], b_q.dtype == tl.float32)
    mass = tl.sum(p, 1)
    o = tl.dot(p.to(b_v.dtype), b_v, input_precision="ieee")
    # One reciprocal for each row: a division costs several instructions for each element.
    share = 1.0 / tl.where(mass > 0, mass, 1.0)
    return o * share[:, None], top + log2(mass, b_q.dtype == tl.float32)


@triton.jit(do_not_specialize=["N", "M", "EXTRA"], do_not_specialize_on_alignment=["p_offset", "p_share", "p_chunk"])
def attend_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_part,
    p_lse,
    p_grid,
    p_offset,
    p_list,
    p_share,
    p_chunk,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    N,
    M,
    EXTRA,
    scale2,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    REMOTE: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BL: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Write the partial outputs and logsumexps of all queries that attend a block of keys."""
    P: tl.constexpr = C // BN
    G: tl.constexpr = H // GROUP
    # Heads are the first index: what they read is adjacent in memory.
    item = tl.program_id(0) // (P * G)
    sub = tl.program_id(0) // G % P
    g = (tl.program_id(0) % G).to(INDEX)
    chunk, share, start, end = find_work(p_grid, p_share, p_chunk, g, item, M, EXTRA)
    if start == end:
        return
    # The positions of queries are read one iteration ahead, because loading their rows depends on them.
    p_list += g * tl.cast(N, INDEX) * (GROUP * REMOTE)
    begin = tl.load(p_offset + g * (M + 1) + chunk) + share * SHARE
    stop = tl.minimum(tl.load(p_offset + g * (M + 1) + chunk + 1), begin + SHARE)
    ahead = begin + tl.arange(0, BM)
    next_pair = tl.load(p_list + ahead, ahead < stop, other=0)
    rows = tl.cast(N, INDEX) * H
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    o_s = start + sub * BN + tl.arange(0, BN)
    m_s = o_s < end
    b_k = tl.load(
        p_k + o_s.to(INDEX)[None, :] * stride_kt + g * stride_kg + o_k[:, None],
        m_s[None, :] & m_k[:, None],
        other=0.0,
    )
    b_v = tl.load(
        p_v + o_s.to(INDEX)[:, None] * stride_vt + g * stride_vg + o_k, m_s[:, None] & m_k[None, :], other=0.0
    )
    if share == 0:
        for n in range(GROUP * (C // BL)):
            h = g * GROUP + n // (C // BL)
            o_t = start + n % (C // BL) * BL + tl.arange(0, BL)
            m_t = o_t < end
            b_q = tl.load(
                p_q + o_t.to(INDEX)[:, None] * stride_qt + h * stride_qh + o_k,
                m_t[:, None] & m_k[None, :],
                other=0.0,
            )
            visible = (o_s[None, :] <= o_t[:, None]) & m_s[None, :]
            o, lse = forward_tile(b_q, b_k, b_v, visible, scale2, True)
            row = sub * rows + o_t.to(INDEX) * H + h
            tl.store(p_part + row[:, None] * K + o_k, o.to(p_part.dtype.element_ty), m_t[:, None] & m_k[None, :])
            tl.store(p_lse + row, lse, m_t)
    for at in range(begin, stop, BM):
        o_i = at + tl.arange(0, BM)
        m_i = o_i < stop
        pair = next_pair
        next_pair = tl.load(p_list + o_i + BM, o_i + BM < stop, other=0)
        query = (pair // REMOTE).to(INDEX)
        b_q = tl.load(
            p_q + (query // H * stride_qt + query % H * stride_qh)[:, None] + o_k,
            m_i[:, None] & m_k[None, :],
            other=0.0,
        )
        o, lse = forward_tile(b_q, b_k, b_v, None, scale2, False)
        row = ((1 + pair % REMOTE) * P + sub) * rows + query
        tl.store(p_part + row[:, None] * K + o_k, o.to(p_part.dtype.element_ty), m_i[:, None] & m_k[None, :])
        tl.store(p_lse + row, lse, m_i)


@triton.jit
def slot_exists(p_choice, row, mask, slot: tl.constexpr, P: tl.constexpr, REMOTE: tl.constexpr):
    """Whether the queries `row` have a partial result in this slot."""
    if slot >= P:
        mask = mask & (tl.load(p_choice + row * REMOTE + (slot // P - 1), mask, other=-1) >= 0)
    return mask


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    p_part,
    p_lse,
    p_choice,
    p_o,
    p_total,
    rows,
    P: tl.constexpr,
    REMOTE: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Merge the partial results: o and the base-2 logsumexp of each query."""
    EXACT: tl.constexpr = p_part.dtype.element_ty == tl.float32
    rows = tl.cast(rows, INDEX)
    row = tl.program_id(0).to(INDEX) * BR + tl.arange(0, BR)
    mask = row < rows
    o_k = tl.arange(0, BK)
    top = tl.full([BR], float("-inf"), tl.float32)
    for slot in tl.static_range((1 + REMOTE) * P):
        exists = slot_exists(p_choice, row, mask, slot, P, REMOTE)
        top = tl.maximum(top, tl.load(p_lse + slot * rows + row, exists, other=float("-inf")))
    total = tl.zeros([BR], tl.float32)
    o = tl.zeros([BR, BK], tl.float32)
    for slot in tl.static_range((1 + REMOTE) * P):
        exists = slot_exists(p_choice, row, mask, slot, P, REMOTE)
        share = exp2(tl.load(p_lse + slot * rows + row, exists, other=float("-inf")) - top, EXACT)
        share = tl.where(exists, share, 0.0)
        b_o = tl.load(p_part + (slot * rows + row)[:, None] * K + o_k, exists[:, None] & (o_k[None, :] < K), other=0.0)
        o += b_o.to(tl.float32) * share[:, None]
        total += share
    o = o * (1.0 / tl.where(mask, total, 1.0))[:, None]
    tl.store(p_o + row[:, None] * K + o_k, o.to(p_o.dtype.element_ty), mask[:, None] & (o_k[None, :] < K))
    tl.store(p_total + row, top + log2(total, EXACT), mask)


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    p_o,
    p_do,
    p_delta,
    p_dq,
    rows,
    K: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    ADD: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Write sum(do * o) of each query, and zeros where its dq will be added up."""
    row = tl.program_id(0).to(INDEX) * BR + tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    mask = (row < rows)[:, None] & (o_k[None, :] < K)
    b_o = tl.load(p_o + row[:, None] * K + o_k, mask, other=0.0).to(tl.float32)
    b_do = tl.load(p_do + row[:, None] * K + o_k, mask, other=0.0).to(tl.float32)
    tl.store(p_delta + row, tl.sum(b_o * b_do, 1), row < rows)
    if ADD:
        tl.store(p_dq + row[:, None] * K + o_k, tl.zeros([BR, BK], p_dq.dtype.element_ty), mask)


@triton.jit
def backward_tile(b_k, b_v, b_q, b_do, lse, delta, visible, scale2, dk, dv, MASK: tl.constexpr):
    """Return dk, dv [BN, BK] with these queries' parts added, and dq [BM, BK]; dk and dq are not scaled yet.

    Scores are held transposed, [BN, BM], so that both sums over queries take them as the left factor as they are.
    """
    s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee") * scale2 - lse[None, :]
    if MASK:
        s = tl.where(visible, s, float("-inf"))
    p = exp2(s, b_q.dtype == tl.float32)
    dv = add_product(dv, p.to(b_do.dtype), b_do, "ieee")
    dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
    ds = (p * (dp - delta[None, :])).to(b_q.dtype)
    dk = add_product(dk, ds, b_q, "ieee")
    return dk, dv, tl.dot(tl.trans(ds), b_k, input_precision="ieee")


@triton.jit(do_not_specialize=["N", "M", "EXTRA"], do_not_specialize_on_alignment=["p_offset", "p_share", "p_chunk"])
def attend_bwd_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_part,
    p_dk,
    p_dv,
    p_scratch,
    p_grid,
    p_offset,
    p_list,
    p_share,
    p_chunk,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    N,
    M,
    EXTRA,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    REMOTE: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BL: tl.constexpr,
    ADD: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Write a block's dk and dv and the partial dq of all queries that attend it.

    ADD: a query has at most two, which are added to zeros; in either order the sum is the same, bit for bit.
    Where a list has extra shares every share leaves its dk and dv in p_scratch [G, 2 * EXTRA, P, 2, BN, BK]: extra
    ones at their number, the first one EXTRA places behind the first of them. `share_kernel` adds them up.
    """
    P: tl.constexpr = C // BN
    H: tl.constexpr = G * GROUP
    item = tl.program_id(0) // (P * G)
    sub = tl.program_id(0) // G % P
    g = (tl.program_id(0) % G).to(INDEX)
    chunk, share, start, end = find_work(p_grid, p_share, p_chunk, g, item, M, EXTRA)
    if start == end:
        return
    # The positions of queries are read one iteration ahead, because loading their rows depends on them.
    p_list += g * tl.cast(N, INDEX) * (GROUP * REMOTE)
    begin = tl.load(p_offset + g * (M + 1) + chunk) + share * SHARE
    stop = tl.minimum(tl.load(p_offset + g * (M + 1) + chunk + 1), begin + SHARE)
    ahead = begin + tl.arange(0, BM)
    next_pair = tl.load(p_list + ahead, ahead < stop, other=0)
    scale2 = scale * 1.4426950408889634
    rows = tl.cast(N, INDEX) * H
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    o_n = tl.arange(0, BN)
    o_s = start + sub * BN + o_n
    m_s = o_s < end
    m_sk = m_s[:, None] & m_k[None, :]
    b_k = tl.load(p_k + o_s.to(INDEX)[:, None] * stride_kt + g * stride_kg + o_k, m_sk, other=0.0)
    b_v = tl.load(p_v + o_s.to(INDEX)[:, None] * stride_vt + g * stride_vg + o_k, m_sk, other=0.0)
    dk = tl.zeros([BN, BK], tl.float32)
    dv = tl.zeros([BN, BK], tl.float32)
    o_scratch = o_n[:, None] * BK + o_k[None, :]
    if share == 0:
        for n in range(GROUP * (C // BL)):
            h = g * GROUP + n // (C // BL)
            o_t = start + n % (C // BL) * BL + tl.arange(0, BL)
            m_t = o_t < end
            row = o_t.to(INDEX) * H + h
            m_tk = m_t[:, None] & m_k[None, :]
            b_q = tl.load(p_q + o_t.to(INDEX)[:, None] * stride_qt + h * stride_qh + o_k, m_tk, other=0.0)
            b_do = tl.load(p_do + row[:, None] * K + o_k, m_tk, other=0.0)
            lse = tl.load(p_lse + row, m_t, other=float("inf"))
            delta = tl.load(p_delta + row, m_t, other=0.0)
            visible = (o_s[:, None] <= o_t[None, :]) & m_s[:, None]
            dk, dv, dq = backward_tile(b_k, b_v, b_q, b_do, lse, delta, visible, scale2, dk, dv, True)
            b_dq = (dq * scale).to(p_part.dtype.element_ty)
            if ADD:
                tl.atomic_add(p_part + row[:, None] * K + o_k, b_dq, m_tk, sem="relaxed")
            else:
                tl.store(p_part + (sub * rows + row)[:, None] * K + o_k, b_dq, m_tk)
    for at in range(begin, stop, BM):
        o_i = at + tl.arange(0, BM)
        m_i = o_i < stop
        pair = next_pair
        next_pair = tl.load(p_list + o_i + BM, o_i + BM < stop, other=0)
        query = (pair // REMOTE).to(INDEX)
        m_ik = m_i[:, None] & m_k[None, :]
        b_q = tl.load(p_q + (query // H * stride_qt + query % H * stride_qh)[:, None] + o_k, m_ik, other=0.0)
        b_do = tl.load(p_do + query[:, None] * K + o_k, m_ik, other=0.0)
        lse = tl.load(p_lse + query, m_i, other=float("inf"))
        delta = tl.load(p_delta + query, m_i, other=0.0)
        dk, dv, dq = backward_tile(b_k, b_v, b_q, b_do, lse, delta, None, scale2, dk, dv, False)
        b_dq = (dq * scale).to(p_part.dtype.element_ty)
        if ADD:
            tl.atomic_add(p_part + query[:, None] * K + o_k, b_dq, m_ik, sem="relaxed")
        else:
            row = ((1 + pair % REMOTE) * P + sub) * rows + query
            tl.store(p_part + row[:, None] * K + o_k, b_dq, m_ik)
    lower = tl.load(p_share + g * (M + 1) + chunk)
    if lower == tl.load(p_share + g * (M + 1) + chunk + 1):
        o = (o_s.to(INDEX)[:, None] * G + g) * K + o_k
        tl.store(p_dk + o, (dk * scale).to(p_dk.dtype.element_ty), m_sk)
        tl.store(p_dv + o, dv.to(p_dv.dtype.element_ty), m_sk)
    else:
        slot = tl.where(share == 0, EXTRA + lower, item - M)
        p = p_scratch + ((g * (2 * EXTRA) + slot) * P + sub) * (2 * BN * BK)
        tl.store(p + o_scratch, dk)
        tl.store(p + BN * BK + o_scratch, dv)


@triton.jit(do_not_specialize=["M", "EXTRA"], do_not_specialize_on_alignment=["p_share", "p_chunk"])
def share_kernel(
    p_scratch,
    p_dk,
    p_dv,
    p_grid,
    p_share,
    p_chunk,
    M,
    EXTRA,
    scale,
    G: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    PARTS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Add up the shares' dk and dv of chunks with long lists, PARTS programs for an extra share.

    Those of a chunk take its rows BR at a time, in turn. Such a chunk has been chosen, so that it is full.
    """
    e = tl.program_id(0) // (PARTS * G)
    part = tl.program_id(0) // G % PARTS
    g = (tl.program_id(0) % G).to(INDEX)
    if e >= tl.load(p_share + g * (M + 1) + M):
        return
    chunk = tl.load(p_chunk + g * EXTRA + e)
    lower = tl.load(p_share + g * (M + 1) + chunk)
    upper = tl.load(p_share + g * (M + 1) + chunk + 1)
    start = tl.load(p_grid + 3 * chunk)
    o_r = tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    for low in range(((e - lower) * PARTS + part) * BR, C, (upper - lower) * PARTS * BR):
        # Blocks of BN keys have their places one after the other.
        place = low // BN * (2 * BN * BK) + (low % BN + o_r)[:, None] * BK + o_k[None, :]
        p = p_scratch + (g * (2 * EXTRA) + EXTRA + lower) * (2 * C * BK) + place
        dk = tl.load(p)
        dv = tl.load(p + BN * BK)
        for other in range(lower, upper):
            p = p_scratch + (g * (2 * EXTRA) + other) * (2 * C * BK) + place
            dk += tl.load(p)
            dv += tl.load(p + BN * BK)
        o = ((start + low + o_r).to(INDEX)[:, None] * G + g) * K + o_k
        tl.store(p_dk + o, (dk * scale).to(p_dk.dtype.element_ty), (o_k < K)[None, :])
        tl.store(p_dv + o, dv.to(p_dv.dtype.element_ty), (o_k < K)[None, :])


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(
    p_part,
    p_choice,
    p_dq,
    rows,
    P: tl.constexpr,
    REMOTE: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Add up the partial dq of each query."""
    rows = tl.cast(rows, INDEX)
    row = tl.program_id(0).to(INDEX) * BR + tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    dq = tl.zeros([BR, BK], tl.float32)
    for slot in tl.static_range((1 + REMOTE) * P):
        exists = slot_exists(p_choice, row, row < rows, slot, P, REMOTE)
        b_dq = tl.load(p_part + (slot * rows + row)[:, None] * K + o_k, exists[:, None] & (o_k[None, :] < K), other=0.0)
        dq += b_dq.to(tl.float32)
    mask = (row < rows)[:, None] & (o_k[None, :] < K)
    tl.store(p_dq + row[:, None] * K + o_k, dq.to(p_dq.dtype.element_ty), mask)
