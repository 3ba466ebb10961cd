"""Triton kernels of one decoding step: the best chunks of each part of the cache, then attention to the best of all."""

import triton
import triton.language as tl

from basecap.ops.top1_chunk.triton_kernels.kernels_choose import empty_list, insert, insert_tile


@triton.jit
def length_of(p_lengths, length, b):
    """Return the tokens of sequence `b` in the cache: `length`, or the number in `p_lengths`, at most `length`."""
    if p_lengths is not None:
        length = tl.minimum(tl.load(p_lengths + b), length).to(tl.int32)
    return length


@triton.jit(do_not_specialize=["length"])
def score_exact_kernel(
    p_q,
    p_k,
    p_lengths,
    p_score,
    p_index,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kg,
    length,
    part,
    scale2,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    REMOTE: tl.constexpr,
    R: tl.constexpr,
    GP: tl.constexpr,
):
    """Write the REMOTE chunks of the largest mass among `part` chunks, for all queries of a key head.

    Programs of one split and several heads run side by side: their keys are side by side in memory.
    """
    g = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    o_g = tl.arange(0, GP)
    o_k = tl.arange(0, BK)
    low = split * part
    high = tl.minimum(low + part, length_of(p_lengths, length, b) // C)
    b_q = tl.load(
        p_q + b * stride_qb + (g * GROUP + o_g)[:, None] * stride_qh + o_k,
        (o_g[:, None] < GROUP) & (o_k[None, :] < K),
        other=0.0,
    )
    p_k += b * stride_kb + g * stride_kg
    best, index = empty_list(GP, REMOTE, R)
    for c in range(low, high):
        top = tl.full([GP], float("-inf"), tl.float32)
        total = tl.zeros([GP], tl.float32)
        for n in tl.static_range(C // BN):
            o_s = c * C + n * BN + tl.arange(0, BN)
            b_k = tl.load(p_k + o_s.to(tl.int64)[None, :] * stride_kt + o_k[:, None], o_k[:, None] < K, other=0.0)
            s = tl.dot(b_q, b_k, input_precision="ieee") * scale2
            higher = tl.maximum(top, tl.max(s, 1))
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(s - higher[:, None]), 1)
            top = higher
        best, index = insert(best, index, top + tl.log2(total), c, R)
    heads = tl.num_programs(0) * GROUP
    row = (b * heads + g * GROUP + o_g) * tl.num_programs(1) + split
    store_candidates(best, index, p_score, p_index, row, o_g < GROUP, REMOTE, R)


@triton.jit(do_not_specialize=["length"])
def score_approx_kernel(
    p_q,
    p_sums,
    p_lengths,
    p_score,
    p_index,
    stride_qb,
    stride_qh,
    stride_sb,
    stride_sm,
    stride_sg,
    length,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    REMOTE: tl.constexpr,
    R: tl.constexpr,
):
    """Write the REMOTE best of BN chunks by the sums of their keys, for each query of a key head.

    One query has no use for a matrix product: its scores are sums over the tile's rows.
    """
    split = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_c = split * BN + tl.arange(0, BN)
    full = length_of(p_lengths, length, b) // C
    sums = tl.load(
        p_sums + b * stride_sb + g * stride_sg + o_c.to(tl.int64)[:, None] * stride_sm + o_k,
        (o_c[:, None] < full) & (o_k[None, :] < K),
        other=0.0,
    )
    heads = tl.num_programs(1) * GROUP
    for n in tl.static_range(GROUP):
        h = g * GROUP + n
        q = tl.load(p_q + b * stride_qb + h * stride_qh + o_k, o_k < K, other=0.0).to(tl.float32)
        scores = tl.where(o_c < full, tl.sum(sums * q[None, :], 1), float("-inf"))
        best, index = empty_list(1, REMOTE, R)
        best, index = insert_tile(best, index, scores[None, :], split * BN, REMOTE, R)
        row = (b * heads + h) * tl.num_programs(0) + split + tl.zeros([1], tl.int64)
        store_candidates(best, index, p_score, p_index, row, row >= 0, REMOTE, R)


@triton.jit
def store_candidates(best, index, p_score, p_index, row, mask, REMOTE: tl.constexpr, R: tl.constexpr):
    """Write lists of REMOTE candidates, one for each `row`."""
    if R == 1:
        tl.store(p_score + row, best, mask)
        tl.store(p_index + row, index, mask)
    else:
        place = tl.arange(0, R)
        mask = mask[:, None] & (place[None, :] < REMOTE)
        tl.store(p_score + row[:, None] * REMOTE + place[None, :], best, mask)
        tl.store(p_index + row[:, None] * REMOTE + place[None, :], index, mask)


@triton.jit
def add_keys(q, p_k, p_v, start, end, stride_t, o_k, scale2, top, total, o, K: tl.constexpr, BN: tl.constexpr):
    """Add a block of keys to the running softmax of one query; also return the sum of those before `end`."""
    o_s = start + tl.arange(0, BN)
    mask = (o_s[:, None] < end) & (o_k[None, :] < K)
    offset = o_s.to(tl.int64)[:, None] * stride_t + o_k
    b_k = tl.load(p_k + offset, mask, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + offset, mask, other=0.0).to(tl.float32)
    s = tl.where(o_s < end, tl.sum(q[None, :] * b_k, 1) * scale2, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 0))
    p = tl.exp2(s - higher)
    shrink = tl.exp2(top - higher)
    return higher, total * shrink + tl.sum(p, 0), o * shrink + tl.sum(p[:, None] * b_v, 0), tl.sum(b_k, 0)


@triton.jit(do_not_specialize=["candidates", "length"])
def step_kernel(
    p_q,
    p_key,
    p_value,
    p_k,
    p_v,
    p_sums,
    p_lengths,
    p_score,
    p_index,
    p_o,
    stride_qb,
    stride_qh,
    stride_b,
    stride_g,
    stride_vb,
    stride_vg,
    stride_kb,
    stride_kt,
    stride_kg,
    stride_sb,
    stride_sm,
    stride_sg,
    candidates,
    length,
    scale2,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    REMOTE: tl.constexpr,
):
    """Attend from the token after `length`: to itself, to its own chunk and to the best REMOTE of its `candidates`.

    One query of each key head puts key and value into the cache, and the sum of a chunk that they fill. Nothing reads
    them there meanwhile.
    """
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    g = (h // GROUP).to(tl.int64)
    row = b * tl.num_programs(0) + h
    at = length_of(p_lengths, length, b)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    q = tl.load(p_q + b * stride_qb + h * stride_qh + o_k, m_k, other=0.0).to(tl.float32)
    key = tl.load(p_key + b * stride_b + g * stride_g + o_k, m_k, other=0.0)
    value = tl.load(p_value + b * stride_vb + g * stride_vg + o_k, m_k, other=0.0)
    p_k += b * stride_kb + g * stride_kg
    p_v += b * stride_kb + g * stride_kg
    keys = key.to(tl.float32)
    top = tl.sum(q * keys, 0) * scale2
    total = 1.0
    o = value.to(tl.float32)
    own = at // C * C
    for n in range(own, at, BN):
        top, total, o, more = add_keys(q, p_k, p_v, n, at, stride_kt, o_k, scale2, top, total, o, K, BN)
        keys += more
    if h % GROUP == 0:
        place = tl.cast(at, tl.int64) * stride_kt + o_k
        tl.store(p_k + place, key.to(p_k.dtype.element_ty), m_k)
        tl.store(p_v + place, value.to(p_v.dtype.element_ty), m_k)
        full = at + 1 - own == C
        tl.store(
            p_sums + b * stride_sb + tl.cast(own // C, tl.int64) * stride_sm + g * stride_sg + o_k, keys, m_k & full
        )
    o_c = tl.arange(0, BC)
    score = tl.load(p_score + row * candidates + o_c, o_c < candidates, other=float("-inf"))
    index = tl.load(p_index + row * candidates + o_c, o_c < candidates, other=-1)
    for _ in tl.static_range(REMOTE):
        best = tl.max(score, 0)
        chunk = tl.min(tl.where(score == best, index, 1 << 30), 0)
        if best > float("-inf"):
            for n in range(chunk * C, chunk * C + C, BN):
                top, total, o, _sum = add_keys(q, p_k, p_v, n, own, stride_kt, o_k, scale2, top, total, o, K, BN)
        score = tl.where(index == chunk, float("-inf"), score)
    tl.store(p_o + row * K + o_k, (o / total).to(p_o.dtype.element_ty), m_k)
