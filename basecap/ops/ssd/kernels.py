"""The scalar-decay recurrence in Triton: one program per chunk of BT tokens and head; see README.md.

Tensors: q, k [B, T, G, K]; v, o [B, T, H, V]; states between chunks [B, M, H, K, V]; all contiguous. The decays come as
sums within each chunk, [B, H, T], split into whole numbers (`coarse`) and the rest (`fine`): differences of the two
keep their digits however strong the decays are. `ids` are the segments [B, T], read only where PACKED.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(base, i_b, o_t, T, head, heads, width, BLOCK: tl.constexpr):
    """Addresses and mask of the rows `o_t` of one head of a [B, T, heads, width] tensor."""
    o = tl.arange(0, BLOCK)
    p = base + ((i_b * T + o_t)[:, None] * heads + head) * width + o[None, :]
    return p, (o_t < T)[:, None] & (o < width)[None, :]


@triton.jit
def _state(base, i_b, i_m, i_h, M, H, K, V, BK: tl.constexpr, BV: tl.constexpr):
    """Addresses and mask of the state [K, V] of one chunk and head."""
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    p = base + ((i_b * M + i_m) * H + i_h) * K * V + o_k[:, None] * V + o_v[None, :]
    return p, (o_k < K)[:, None] & (o_v < V)[None, :]


@triton.jit
def _within(b_coarse, b_fine, b_ids, o_t, T, PACKED: tl.constexpr):
    """The decay from token s to token t of one chunk, [t, s]; zero for s > t and across segments."""
    seen = (o_t[:, None] >= o_t[None, :]) & (o_t < T)[:, None]
    if PACKED:
        seen = seen & (b_ids[:, None] == b_ids[None, :])
    exponent = (b_coarse[:, None] - b_coarse[None, :]) + (b_fine[:, None] - b_fine[None, :])
    return tl.where(seen, tl.exp(tl.where(seen, exponent, 0.0)), 0.0)


@triton.jit
def _edges(coarse, fine, ids, p_row, i_b, i_m, o_t, T, PACKED: tl.constexpr, BT: tl.constexpr):
    """Sums, segments, and the decays from the chunk's start to each token and from each token to its end."""
    m_t = o_t < T
    last = tl.minimum((i_m + 1) * BT, T) - 1
    b_coarse = tl.load(coarse + p_row + o_t, mask=m_t, other=0.0)
    b_fine = tl.load(fine + p_row + o_t, mask=m_t, other=0.0)
    rest = (tl.load(coarse + p_row + last) - b_coarse) + (tl.load(fine + p_row + last) - b_fine)
    b_from = tl.where(m_t, tl.exp(b_coarse + b_fine), 0.0)
    b_to = tl.where(m_t, tl.exp(tl.where(m_t, rest, 0.0)), 0.0)
    b_ids = o_t
    if PACKED:
        b_ids = tl.load(ids + i_b * T + o_t, mask=m_t, other=0)
        b_from = tl.where(b_ids == tl.load(ids + i_b * T + tl.maximum(i_m * BT - 1, 0)), b_from, 0.0)
        b_to = tl.where(b_ids == tl.load(ids + i_b * T + last), b_to, 0.0)
    return b_coarse, b_fine, b_ids, b_from, b_to


@triton.jit
def chunk_fwd_kernel(
    k, v, coarse, fine, ids, states,
    T, G, H, K, V, M,
    BACK: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the state at its end; with BACK (k = q, v = do) to the gradient of that at its start."""
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = i_m * BT + tl.arange(0, BT)
    p_row = (i_b * H + i_h) * T
    _, _, _, b_from, b_to = _edges(coarse, fine, ids, p_row, i_b, i_m, o_t, T, PACKED, BT)
    b_weight = b_to
    if BACK:
        b_weight = b_from
    p_k, m_k = _rows(k, i_b, o_t, T, i_h // (H // G), G, K, BK)
    p_v, m_v = _rows(v, i_b, o_t, T, i_h, H, V, BV)
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    b_v = (b_v * b_weight[:, None]).to(b_k.dtype)
    p_s, m_s = _state(states, i_b, i_m, i_h, M, H, K, V, BK, BV)
    tl.store(p_s, tl.dot(tl.trans(b_k), b_v, input_precision=PRECISION), mask=m_s)


@triton.jit
def carry_fwd_kernel(
    states, decay, first, last,
    H, M, X,
    BACK: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Chain the chunks: replace what each adds by the state before it; with BACK from the end, by that after it.

    `decay` [B, M, H] is that across each chunk; a state has X = K V numbers.
    """
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_x = tl.program_id(0) * BX + tl.arange(0, BX)
    m_x = o_x < X
    b_state = tl.load(first + (i_b * H + i_h) * X + o_x, mask=m_x, other=0.0)
    for i in range(M):
        i_m = i
        if BACK:
            i_m = M - 1 - i
        p_state = states + ((i_b * M + i_m) * H + i_h) * X + o_x
        b_decay = tl.load(decay + (i_b * M + i_m) * H + i_h)
        b_added = tl.load(p_state, mask=m_x, other=0.0)
        tl.store(p_state, b_state, mask=m_x)
        b_state = b_decay * b_state + b_added
    tl.store(last + (i_b * H + i_h) * X + o_x, b_state, mask=m_x)


@triton.jit
def output_fwd_kernel(
    q, k, v, coarse, fine, ids, states, o,
    T, G, H, K, V, M,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk: attention within it, and what its tokens read from the state before it."""
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = i_m * BT + tl.arange(0, BT)
    p_row = (i_b * H + i_h) * T
    b_coarse, b_fine, b_ids, b_from, _ = _edges(coarse, fine, ids, p_row, i_b, i_m, o_t, T, PACKED, BT)
    group = i_h // (H // G)
    p_q, m_q = _rows(q, i_b, o_t, T, group, G, K, BK)
    p_k, m_k = _rows(k, i_b, o_t, T, group, G, K, BK)
    p_v, m_v = _rows(v, i_b, o_t, T, i_h, H, V, BV)
    p_s, m_s = _state(states, i_b, i_m, i_h, M, H, K, V, BK, BV)
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    b_s = tl.load(p_s, mask=m_s, other=0.0).to(b_q.dtype)
    b_o = tl.dot(b_q, b_s, input_precision=PRECISION) * b_from[:, None]
    b_w = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_w *= _within(b_coarse, b_fine, b_ids, o_t, T, PACKED)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    b_o += tl.dot(b_w.to(b_v.dtype), b_v, input_precision=PRECISION)
    p_o, m_o = _rows(o, i_b, o_t, T, i_h, H, V, BV)
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_o)


@triton.jit
def scan_bwd_kernel(
    do, q, k, v, coarse, fine, ids, decay, states, later, dq, dk, dv, dlog,
    T, G, H, K, V, M,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk, from the state before it and the gradient of the state after it (`later`).

    dq and dk [B, T, H, K] are per head, dlog [B, H, T] is the gradient of the log decays; `decay` as in the carry.
    """
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = i_m * BT + tl.arange(0, BT)
    p_row = (i_b * H + i_h) * T
    b_coarse, b_fine, b_ids, b_from, b_to = _edges(coarse, fine, ids, p_row, i_b, i_m, o_t, T, PACKED, BT)
    group = i_h // (H // G)
    p_q, m_q = _rows(q, i_b, o_t, T, group, G, K, BK)
    p_k, m_k = _rows(k, i_b, o_t, T, group, G, K, BK)
    p_v, m_v = _rows(v, i_b, o_t, T, i_h, H, V, BV)
    p_do, m_do = _rows(do, i_b, o_t, T, i_h, H, V, BV)
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    b_do = tl.load(p_do, mask=m_do, other=0.0)
    b_within = _within(b_coarse, b_fine, b_ids, o_t, T, PACKED)
    b_w = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_within
    b_dw = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    # The decay at t stands between every s < t and r >= t. Summing pairs (r, s) over r first, then over s, adds up just
    # those; differences of sums over all pairs, as in q.dq - k.dk, would leave the others' rounding errors.
    b_pairs = tl.where(o_t[:, None] > o_t[None, :], b_w * b_dw, 0.0)
    b_after = tl.where(o_t[:, None] <= o_t[None, :], 1.0, 0.0)
    b_pairs = tl.dot(b_after, b_pairs, input_precision=PRECISION)
    b_dlog = tl.sum(tl.where(o_t[:, None] > o_t[None, :], b_pairs, 0.0), 1)
    b_w, b_ds = b_w.to(b_q.dtype), (b_dw * b_within).to(b_q.dtype)

    p_later, m_s = _state(later, i_b, i_m, i_h, M, H, K, V, BK, BV)
    b_s = tl.load(p_later, mask=m_s, other=0.0).to(b_q.dtype)
    b_dv = tl.dot(b_k, b_s, input_precision=PRECISION) * b_to[:, None]
    b_dv += tl.dot(tl.trans(b_w), b_do, input_precision=PRECISION)
    p_dv, m_dv = _rows(dv, i_b, o_t, T, i_h, H, V, BV)
    tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=m_dv)

    b_dk = tl.dot(b_v, tl.trans(b_s), input_precision=PRECISION) * b_to[:, None]
    b_left = tl.sum(b_dk * b_k, 1)
    b_dlog += tl.cumsum(b_left, 0) - b_left
    b_dk += tl.dot(tl.trans(b_ds), b_q, input_precision=PRECISION)
    p_dk, m_dk = _rows(dk, i_b, o_t, T, i_h, H, K, BK)
    tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=m_dk)

    p_s, m_s = _state(states, i_b, i_m, i_h, M, H, K, V, BK, BV)
    b_s = tl.load(p_s, mask=m_s, other=0.0).to(b_q.dtype)
    b_dq = tl.dot(b_do, tl.trans(b_s), input_precision=PRECISION) * b_from[:, None]
    b_dlog += tl.cumsum(tl.sum(b_dq * b_q, 1), 0, reverse=True)
    b_dq += tl.dot(b_ds, b_k, input_precision=PRECISION)
    p_dq, m_dq = _rows(dq, i_b, o_t, T, i_h, H, K, BK)
    tl.store(p_dq, b_dq.to(dq.dtype.element_ty), mask=m_dq)

    b_across = tl.load(p_s, mask=m_s, other=0.0) * tl.load(p_later, mask=m_s, other=0.0)
    b_dlog += tl.load(decay + (i_b * M + i_m) * H + i_h) * tl.sum(tl.sum(b_across, 1), 0)
    tl.store(dlog + p_row + o_t, b_dlog, mask=o_t < T)
