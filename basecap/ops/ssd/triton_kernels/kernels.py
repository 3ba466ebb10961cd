"""The scalar-decay recurrence in Triton, in chunks of BT tokens; see README.md.

Tensors: q, k [B, T, G, K]; v, o [B, T, H, V], the inputs in rows that may be parts of longer ones (`stride_*`); states
between chunks [B, M, H, K, V]. The decays come as sums within each chunk, [B, H, T], split into whole numbers
(`coarse`) and the rest (`fine`): differences of the two keep their digits however strong the decays are. `from_start`
and `to_end` [B, H, T] are the decays between each token and the edges of its chunk, `across` [B, H, M] those across the
chunks. `ids` are the segments [B, T], read only where PACKED.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_tiles import numbered_state


@triton.jit
def _tokens(base, i_b, i_m, T, stride, o_x, width, BT: tl.constexpr):
    """Addresses and mask of the channels `o_x` of a chunk's tokens."""
    o_r = tl.arange(0, BT)
    p = base + (i_b * T + i_m * BT) * stride + (o_r[:, None] * stride + o_x[None, :])
    return p, (i_m * BT + o_r < T)[:, None] & (o_x < width)[None, :]


@triton.jit
def _heads(i, G, H, HEADS: tl.constexpr):
    """The group and the range of heads of program `i`: at most HEADS of them, which share queries and keys."""
    parts = tl.cdiv(H // G, HEADS)
    group = i // parts
    first = group * (H // G) + i % parts * HEADS
    return group, first, tl.minimum(first + HEADS, (group + 1) * (H // G))


@triton.jit
def _within(coarse, fine, p_row, o_t, seen, T, BACK: tl.constexpr):
    """The decay [a, b] from token b of a chunk to token a, with BACK from a to b; zero where not `seen`."""
    b_coarse = tl.load(coarse + p_row + o_t, mask=o_t < T, other=0.0)
    b_fine = tl.load(fine + p_row + o_t, mask=o_t < T, other=0.0)
    exponent = (b_coarse[:, None] - b_coarse[None, :]) + (b_fine[:, None] - b_fine[None, :])
    if BACK:
        exponent = -exponent
    return tl.where(seen, tl.exp(tl.where(seen, exponent, 0.0)), 0.0)


@triton.jit
def _seen(ids, i_b, o_t, T, BACK: tl.constexpr, PACKED: tl.constexpr):
    """Which tokens a of a chunk see which tokens b, [a, b]; with BACK which a are seen by which b."""
    if BACK:
        seen = (o_t[:, None] <= o_t[None, :]) & (o_t < T)[None, :]
    else:
        seen = (o_t[:, None] >= o_t[None, :]) & (o_t < T)[:, None]
    if PACKED:
        b_ids = tl.load(ids + i_b * T + o_t, mask=o_t < T, other=0)
        seen = seen & (b_ids[:, None] == b_ids[None, :])
    return seen


@triton.jit
def decays_fwd_kernel(
    log_decay, ids, coarse, fine, from_start, to_end, across,
    stride_b, stride_t, stride_h, T, H, M,
    LOWEST: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Sum a chunk's log decays in float64; the decays from its start to each token, from each to its end, across it.

    None is lower than LOWEST: differences of infinities would be NaN.
    """
    i_m, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_h, o_t = (tl.program_id(0) * BH + tl.arange(0, BH)).to(tl.int64), i_m * BT + tl.arange(0, BT)
    m_h, m_t = o_h < H, o_t < T
    p_log = log_decay + i_b * stride_b + o_t[:, None] * stride_t + o_h[None, :] * stride_h
    b_log = tl.load(p_log, mask=m_t[:, None] & m_h[None, :], other=0.0)
    b_log = tl.where(b_log < LOWEST, LOWEST, b_log).to(tl.float64)
    b_sum, b_total = tl.cumsum(b_log, 0), tl.sum(b_log, 0)
    b_coarse = tl.floor(b_sum)
    b_from = tl.exp(b_sum.to(tl.float32))
    b_to = tl.exp((b_total[None, :] - b_sum).to(tl.float32))
    b_across = tl.exp(b_total.to(tl.float32))
    if PACKED:
        b_ids = tl.load(ids + i_b * T + o_t, mask=m_t, other=0)
        before = tl.load(ids + i_b * T + tl.maximum(i_m * BT - 1, 0))
        last = tl.load(ids + i_b * T + tl.minimum((i_m + 1) * BT, T) - 1)
        b_from = tl.where((b_ids == before)[:, None], b_from, 0.0)
        b_to = tl.where((b_ids == last)[:, None], b_to, 0.0)
        b_across = tl.where(before == last, b_across, 0.0)
    o = (i_b * H + o_h)[None, :] * T + o_t[:, None]
    m = m_t[:, None] & m_h[None, :]
    tl.store(coarse + o, b_coarse.to(tl.float32), mask=m)
    tl.store(fine + o, (b_sum - b_coarse).to(tl.float32), mask=m)
    tl.store(from_start + o, b_from, mask=m)
    tl.store(to_end + o, b_to, mask=m)
    tl.store(across + (i_b * H + o_h) * M + i_m, b_across, mask=m_h)


@triton.jit
def states_fwd_kernel(
    k, v, weight, across, first, states, last,
    stride_k, stride_v, T, G, H, K, V, M,
    BACK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Walk along the chunks with a block of the state: keep it before each, then let it decay and add k (weight v)^T.

    With BACK from the end, for the gradients of the states after each chunk (k = q, v = do). The first state is zero
    when None.
    """
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.cdiv(V, BV)
    o_k = tl.program_id(0) // blocks * BK + tl.arange(0, BK)
    o_v = tl.program_id(0) % blocks * BV + tl.arange(0, BV)
    k += i_h // (H // G) * K
    v += i_h * V
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    b_s = tl.zeros([BK, BV], tl.float32)
    if first is not None:
        p_first, _ = numbered_state(first, i_b * H + i_h, K, V, o_k, o_v)
        b_s = tl.load(p_first, mask=m_s, other=0.0)
    for i in tl.range(0, M, num_stages=STAGES):
        i_m = i
        if BACK:
            i_m = M - 1 - i
        b_across = tl.load(across + (i_b * H + i_h) * M + i_m)
        o_t = i_m * BT + tl.arange(0, BT)
        b_weight = tl.load(weight + (i_b * H + i_h) * T + o_t, mask=o_t < T, other=0.0)
        p_k, m_k = _tokens(k, i_b, i_m, T, stride_k, o_k, K, BT)
        p_v, m_v = _tokens(v, i_b, i_m, T, stride_v, o_v, V, BT)
        b_k = tl.load(p_k, mask=m_k, other=0.0)
        b_v = tl.load(p_v, mask=m_v, other=0.0)
        p_s, _ = numbered_state(states, (i_b * M + i_m) * H + i_h, K, V, o_k, o_v)
        tl.store(p_s, b_s.to(states.dtype.element_ty), mask=m_s)
        b_v = (b_v * b_weight[:, None]).to(b_k.dtype)
        b_s = tl.dot(tl.trans(b_k), b_v, b_s * b_across, input_precision=PRECISION)
    p_last, _ = numbered_state(last, i_b * H + i_h, K, V, o_k, o_v)
    tl.store(p_last, b_s, mask=m_s)


@triton.jit
def output_fwd_kernel(
    q, k, v, coarse, fine, from_start, ids, states, o,
    stride_q, stride_k, stride_v, T, G, H, K, V, M,
    HEADS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk for heads of one group: attention within it, and what is read from the state before it."""
    i_m, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group, first, stop = _heads(tl.program_id(0), G, H, HEADS)
    o_k, o_v, o_t = tl.arange(0, BK), tl.arange(0, BV), i_m * BT + tl.arange(0, BT)
    p_q, m_q = _tokens(q + group * K, i_b, i_m, T, stride_q, o_k, K, BT)
    p_k, m_k = _tokens(k + group * K, i_b, i_m, T, stride_k, o_k, K, BT)
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    b_scores = tl.dot(b_q, tl.trans(tl.load(p_k, mask=m_k, other=0.0)), input_precision=PRECISION)
    seen = _seen(ids, i_b, o_t, T, False, PACKED)
    for i_h in tl.range(first, stop, num_stages=STAGES):
        p_row = (i_b * H + i_h) * T
        p_v, m_v = _tokens(v + i_h * V, i_b, i_m, T, stride_v, o_v, V, BT)
        p_s, m_s = numbered_state(states, (i_b * M + i_m) * H + i_h, K, V, o_k, o_v)
        b_v = tl.load(p_v, mask=m_v, other=0.0)
        b_s = tl.load(p_s, mask=m_s, other=0.0)
        b_from = tl.load(from_start + p_row + o_t, mask=o_t < T, other=0.0)
        b_w = (b_scores * _within(coarse, fine, p_row, o_t, seen, T, False)).to(b_v.dtype)
        b_o = tl.dot(b_q, b_s, input_precision=PRECISION) * b_from[:, None]
        b_o = tl.dot(b_w, b_v, b_o, input_precision=PRECISION)
        p_o, m_o = _tokens(o + i_h * V, i_b, i_m, T, H * V, o_v, V, BT)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_o)


@triton.jit
def values_bwd_kernel(
    do, q, k, v, coarse, fine, to_end, ids, later, dv, read, written, left, dscores,
    stride_q, stride_k, stride_v, T, G, H, K, V, M,
    HEADS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's values for heads of one group, from the gradient of the state after it (`later`).

    Also what the log decays need of the chunk's own pairs (see `decays_bwd_kernel`), and the gradient of k q^T, which
    the heads share: `dscores` [B, M, programs, BT, BT].
    """
    i_m, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group, first, stop = _heads(tl.program_id(0), G, H, HEADS)
    o_r, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    o_t = i_m * BT + o_r
    p_q, m_q = _tokens(q + group * K, i_b, i_m, T, stride_q, o_k, K, BT)
    p_k, m_k = _tokens(k + group * K, i_b, i_m, T, stride_k, o_k, K, BT)
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    b_scores = tl.dot(b_k, tl.trans(tl.load(p_q, mask=m_q, other=0.0)), input_precision=PRECISION)
    b_dscores = tl.zeros([BT, BT], tl.float32)
    seen = _seen(ids, i_b, o_t, T, True, PACKED)
    for i_h in tl.range(first, stop, num_stages=STAGES):
        p_row = (i_b * H + i_h) * T
        p_v, m_v = _tokens(v + i_h * V, i_b, i_m, T, stride_v, o_v, V, BT)
        p_do, _ = _tokens(do + i_h * V, i_b, i_m, T, H * V, o_v, V, BT)
        p_e, m_e = numbered_state(later, (i_b * M + i_m) * H + i_h, K, V, o_k, o_v)
        b_v = tl.load(p_v, mask=m_v, other=0.0)
        b_do = tl.load(p_do, mask=m_v, other=0.0)
        b_e = tl.load(p_e, mask=m_e, other=0.0)
        b_to = tl.load(to_end + p_row + o_t, mask=o_t < T, other=0.0)
        b_dv = tl.dot(b_k, b_e, input_precision=PRECISION) * b_to[:, None]
        b_left = tl.sum(b_dv * b_v, 1)
        b_within = _within(coarse, fine, p_row, o_t, seen, T, True)
        b_dw = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        b_dscores += b_dw * b_within
        b_w = b_scores * b_within
        b_dv = tl.dot(b_w.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        p_dv, _ = _tokens(dv + i_h * V, i_b, i_m, T, H * V, o_v, V, BT)
        tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=m_v)
        b_pairs = tl.where(o_r[:, None] < o_r[None, :], b_w * b_dw, 0.0)
        tl.store(read + p_row + o_t, tl.sum(b_pairs, 0), mask=o_t < T)
        tl.store(written + p_row + o_t, tl.sum(b_pairs, 1), mask=o_t < T)
        tl.store(left + p_row + o_t, b_left, mask=o_t < T)
    p_dscores = dscores + ((i_b * M + i_m) * tl.num_programs(0) + tl.program_id(0)) * BT * BT
    tl.store(p_dscores + (o_r[:, None] * BT + o_r[None, :]), b_dscores)


@triton.jit
def keys_bwd_kernel(
    do, q, k, v, from_start, to_end, states, later, dscores, dq, dk, entered, kept,
    stride_q, stride_k, stride_v, T, G, H, K, V, M,
    HEADS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of BK channels of a chunk's queries and keys, summed over the heads of their group.

    Also what the log decays need of these channels of the states: `entered` [blocks, B, H, T] and `kept`
    [blocks, B, H, M].
    """
    i_m, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    blocks, parts = tl.cdiv(K, BK), tl.cdiv(H // G, HEADS)
    group, i_k = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    o_r, o_k, o_v = tl.arange(0, BT), i_k * BK + tl.arange(0, BK), tl.arange(0, BV)
    o_t = i_m * BT + o_r
    p_block = (i_k * tl.num_programs(2) + i_b) * H
    p_q, m_q = _tokens(q + group * K, i_b, i_m, T, stride_q, o_k, K, BT)
    p_k, m_k = _tokens(k + group * K, i_b, i_m, T, stride_k, o_k, K, BT)
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    b_dscores = tl.zeros([BT, BT], tl.float32)
    for i in range(parts):
        p_dscores = dscores + (((i_b * M + i_m) * G + group) * parts + i) * BT * BT
        b_dscores += tl.load(p_dscores + (o_r[:, None] * BT + o_r[None, :]))
    b_dscores = b_dscores.to(b_q.dtype)
    b_dq = tl.dot(tl.trans(b_dscores), b_k, input_precision=PRECISION)
    b_dk = tl.dot(b_dscores, b_q, input_precision=PRECISION)
    for i_h in tl.range(group * (H // G), (group + 1) * (H // G), num_stages=STAGES):
        p_row = (i_b * H + i_h) * T
        p_v, m_v = _tokens(v + i_h * V, i_b, i_m, T, stride_v, o_v, V, BT)
        p_do, _ = _tokens(do + i_h * V, i_b, i_m, T, H * V, o_v, V, BT)
        p_s, m_s = numbered_state(states, (i_b * M + i_m) * H + i_h, K, V, o_k, o_v)
        p_e, _ = numbered_state(later, (i_b * M + i_m) * H + i_h, K, V, o_k, o_v)
        b_v = tl.load(p_v, mask=m_v, other=0.0)
        b_do = tl.load(p_do, mask=m_v, other=0.0)
        b_s = tl.load(p_s, mask=m_s, other=0.0)
        b_e = tl.load(p_e, mask=m_s, other=0.0)
        b_from = tl.load(from_start + p_row + o_t, mask=o_t < T, other=0.0)
        b_to = tl.load(to_end + p_row + o_t, mask=o_t < T, other=0.0)
        b_read = tl.dot(b_do, tl.trans(b_s), input_precision=PRECISION) * b_from[:, None]
        b_dq += b_read
        # Scaled afterwards, which also keeps float32's sums over heads from being one long chain of roundings.
        b_dk += tl.dot(b_v, tl.trans(b_e), input_precision=PRECISION) * b_to[:, None]
        b_kept = tl.sum(tl.sum(b_s.to(tl.float32) * b_e.to(tl.float32), 1), 0)
        tl.store(entered + (p_block + i_h) * T + o_t, tl.sum(b_read * b_q, 1), mask=o_t < T)
        tl.store(kept + (p_block + i_h) * M + i_m, b_kept)
    p_dq, m_dq = _tokens(dq + group * K, i_b, i_m, T, G * K, o_k, K, BT)
    p_dk, _ = _tokens(dk + group * K, i_b, i_m, T, G * K, o_k, K, BT)
    tl.store(p_dq, b_dq.to(dq.dtype.element_ty), mask=m_dq)
    tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=m_dq)


@triton.jit
def decays_bwd_kernel(
    read, written, left, entered, kept, across, log_decay, dlog,
    stride_b, stride_t, stride_h, T, H, M, BLOCKS,
    LOWEST: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's log decays, `dlog` [B, T, H], from the derivatives by the logarithms of what they scale.

    For each token these are `read` from the chunk's earlier tokens and `entered` from the state before it, `written`
    for later tokens and `left` for the state after it; and `kept` across the chunk, without the decay. The log decay at
    t scales what is read from t on, minus what was also written from t on. What both hold are the same rounded numbers,
    which cancel in float64; of those of q.dq - k.dk, say, rounding errors would remain.
    """
    i_m, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_h, o_t = tl.program_id(0) * BH + tl.arange(0, BH), i_m * BT + tl.arange(0, BT)
    m_h = o_h < H
    m = (o_t < T)[:, None] & m_h[None, :]
    o = (i_b * H + o_h)[None, :] * T + o_t[:, None]
    o_m = (i_b * H + o_h) * M + i_m
    b_left = tl.load(left + o, mask=m, other=0.0).to(tl.float64)
    b_sum = tl.load(read + o, mask=m, other=0.0) - (b_left + tl.load(written + o, mask=m, other=0.0))
    b_kept = tl.zeros([BH], tl.float32)
    for i in range(BLOCKS):
        i_all = i * tl.num_programs(2).to(tl.int64) * H
        b_sum += tl.load(entered + i_all * T + o, mask=m, other=0.0)
        b_kept += tl.load(kept + i_all * M + o_m, mask=m_h, other=0.0)
    b_kept *= tl.load(across + o_m, mask=m_h, other=0.0)
    b_dlog = tl.cumsum(b_sum, 0, reverse=True) + (tl.sum(b_left, 0) + b_kept)[None, :]
    p_log = log_decay + i_b * stride_b + o_t[:, None] * stride_t + o_h[None, :].to(tl.int64) * stride_h
    b_dlog = tl.where(tl.load(p_log, mask=m, other=0.0) >= LOWEST, b_dlog, 0.0)
    p_dlog = dlog + (i_b * T + o_t)[:, None] * H + o_h[None, :]
    tl.store(p_dlog, b_dlog.to(dlog.dtype.element_ty), mask=m)
