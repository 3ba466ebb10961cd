"""The backward pass of the recurrence of several writes and reads; tensors as in `kernels`."""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_tiles import numbered_state
from basecap.ops.kernels_shared import add_product
from basecap.ops.ssd_mimo.triton_chunks.kernels import (
    biased_pairs,
    channels,
    head_rows,
    pairs,
    rotation,
    rows,
    shared_rows,
    strength,
    turns,
    within,
)


@triton.jit
def _by_token(b_x, RP: tl.constexpr, BR: tl.constexpr):
    """Sum the rows of each token."""
    return tl.sum(tl.reshape(b_x, [BR // RP, RP]), 1)


@triton.jit
def values_bwd_kernel(
    do, q, k, q_bias, k_bias, v, cos, sin, coarse, fine, to_end, now, kept, ids, later,
    dv, dscores, dnow, dkept, read, written, left,
    T, R, G, H, K, V, A, M,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, RP: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's values and strengths for one head, from that of the state after it (`later`).

    Also that of k q^T, `dscores` [B, M, H, BR, BR], and what the log decays need of the chunk's own pairs, see
    `decays_bwd_kernel` of `basecap.ops.ssd`.
    """
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = i_m * (BR // RP)
    i_t, p_row, there = i_b * T + start, (i_b * H + i_h) * T + start, (T - start).to(tl.int32)
    o_v, o_token = tl.arange(0, BV), tl.arange(0, BR // RP)
    o_t, o_r, m_t, m_r = rows(there, R, RP, BR)
    b_scores, b_dv = tl.zeros([BR, BR], tl.float32), tl.zeros([BR, BV], tl.float32)
    for i_k in tl.range(0, tl.cdiv(K, BK), num_stages=1, disable_licm=True):
        b_q = head_rows(q, q_bias, cos, sin, i_t, i_h, H, G, there, R, A, i_k, K, RP, BR, BK).to(v.dtype.element_ty)
        b_k = head_rows(k, k_bias, cos, sin, i_t, i_h, H, G, there, R, A, i_k, K, RP, BR, BK).to(v.dtype.element_ty)
        b_scores = add_product(b_scores, b_k, tl.trans(b_q), PRECISION)
        o_k = i_k * BK + tl.arange(0, BK)
        p_e, m_e = numbered_state(later, (i_b * M + i_m) * H + i_h, K, V, o_k, o_v)
        b_dv = add_product(b_dv, b_k, tl.load(p_e, mask=m_e, other=0.0), PRECISION)
    p_v, m_v = channels(v, i_t, i_h, H, o_t, o_r, m_r, R, o_v, V)
    p_do, _ = channels(do, i_t, i_h, H, o_t, o_r, m_r, R, o_v, V)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    b_do = tl.load(p_do, mask=m_v, other=0.0)
    b_to = tl.load(to_end + p_row + o_t, mask=m_t, other=0.0)
    b_kept = strength(kept, i_t, i_h, H, o_t, m_t)
    b_dv *= b_to[:, None]
    b_left = _by_token(tl.sum(b_dv * b_v, 1), RP, BR)
    seen, own = pairs(ids, i_t, o_t, m_t, True, PACKED)
    b_within = within(coarse, fine, p_row, o_t, m_t, seen, True)
    b_weights = tl.where(own, strength(now, i_t, i_h, H, o_t, m_t)[:, None], b_within * b_kept[:, None])
    b_dv *= b_kept[:, None]
    b_dv = add_product(b_dv, (b_scores * b_weights).to(b_do.dtype), b_do, PRECISION)
    p_dv, _ = channels(dv, i_t, i_h, H, o_t, o_r, m_r, R, o_v, V)
    tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=m_v)
    b_dweights = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
    p_dscores = dscores + ((i_b * M + i_m) * H + i_h) * BR * BR
    o = tl.arange(0, BR)
    tl.store(p_dscores + (o[:, None] * BR + o[None, :]), (b_weights * b_dweights).to(dscores.dtype.element_ty))
    # The derivatives by the weights' logarithms, and by `now` where both rows are of one token.
    b_scores *= b_dweights
    b_dnow = _by_token(tl.sum(tl.where(own, b_scores, 0.0), 1), RP, BR)
    b_scores *= b_within
    b_written = _by_token(tl.sum(b_scores, 1), RP, BR)
    b_read = _by_token(tl.sum(b_scores * b_kept[:, None], 0), RP, BR)
    m_token = o_token < there
    b_kept = strength(kept, i_t, i_h, H, o_token, m_token)
    p_token = i_t * H + i_h + o_token * H
    tl.store(dnow + p_token, b_dnow, mask=m_token)
    tl.store(dkept + p_token, b_written + b_left, mask=m_token)
    tl.store(read + p_row + o_token, b_read, mask=m_token)
    tl.store(written + p_row + o_token, b_written * b_kept, mask=m_token)
    tl.store(left + p_row + o_token, b_left * b_kept, mask=m_token)


@triton.jit
def keys_bwd_kernel(
    x, other, x_bias, other_bias, v, cos, sin, weight, kept, states, later, dscores,
    dx, dbias, dcos, dsin, entered, passed,
    T, R, G, H, K, V, A, M,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, RP: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of BK channels of a chunk's queries x (with KEYS of its keys), summed over the heads of a group.

    `other` are the keys (queries), `v` is what the states give a gradient with: do (v), times `weight`.
    What a chunk adds to the gradients of the biases goes to `dbias` [B, M, H, R, K]. The first launch, for the queries,
    writes `dcos` and `dsin`, and what the log decays need of these channels of the states: `entered` [blocks, B, H, T]
    and `passed` [blocks, B, H, M]; that for the keys adds to `dcos` and `dsin`.
    """
    i_m, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    blocks, start = tl.cdiv(K, BK), i_m * (BR // RP)
    group, i_k, i_t, there = tl.program_id(0) // blocks, tl.program_id(0) % blocks, i_b * T + start, T - start
    there = there.to(tl.int32)
    p_block = (i_k * tl.num_programs(2) + i_b) * H
    b_dx = tl.zeros([BR // RP, RP, BK], tl.float32)
    for i_h in tl.range(group * (H // G), (group + 1) * (H // G), num_stages=1, disable_licm=True):
        o_k, o_a = i_k * BK + tl.arange(0, BK), i_k * (BK // 2) + tl.arange(0, BK // 2)
        o_v, o_token, o_rank = tl.arange(0, BV), tl.arange(0, BR // RP), tl.arange(0, RP)
        o_t, o_r, m_t, m_r = rows(there, R, RP, BR)
        p_row, i_s = (i_b * H + i_h) * T + start, (i_b * M + i_m) * H + i_h
        if not KEYS:
            p_s, m_s = numbered_state(states, i_s, K, V, o_k, o_v)
            p_e, _ = numbered_state(later, i_s, K, V, o_k, o_v)
            b_passed = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32) * tl.load(p_e, mask=m_s, other=0.0)
            tl.store(passed + (p_block + i_h) * M + i_m, tl.sum(tl.sum(b_passed, 1), 0))
        o = tl.arange(0, BR)
        b_dscores = tl.load(dscores + i_s * BR * BR + (o[:, None] * BR + o[None, :]))
        if not KEYS:
            b_dscores = tl.trans(b_dscores)
        b_other = head_rows(other, other_bias, cos, sin, i_t, i_h, H, G, there, R, A, i_k, K, RP, BR, BK)
        b_d = tl.dot(b_dscores, b_other.to(b_dscores.dtype), input_precision=PRECISION)
        p_v, m_v = channels(v, i_t, i_h, H, o_t, o_r, m_r, R, o_v, V)
        b_v = tl.load(p_v, mask=m_v, other=0.0)
        b_weight = tl.load(weight + p_row + o_t, mask=m_t, other=0.0)
        if KEYS:
            b_weight *= strength(kept, i_t, i_h, H, o_t, m_t)
        p_s, m_s = numbered_state(later if KEYS else states, i_s, K, V, o_k, o_v)
        b_s = tl.load(p_s, mask=m_s, other=0.0)
        b_state = tl.dot(b_v, tl.trans(b_s), input_precision=PRECISION) * b_weight[:, None]
        if not KEYS:
            b_x = head_rows(x, x_bias, cos, sin, i_t, i_h, H, G, there, R, A, i_k, K, RP, BR, BK)
            b_entered = _by_token(tl.sum(b_state * b_x, 1), RP, BR)
            tl.store(entered + (p_block + i_h) * T + start + o_token, b_entered, mask=o_token < there)
        dfirst, dsecond = tl.split(tl.reshape(b_d + b_state, [BR // RP, RP, BK // 2, 2]))
        # By cos and sin, from the pairs before their rotation and the gradients after it.
        first, second = biased_pairs(x, x_bias, i_t, i_h, H, G, there, R, o_k, K, RP, BR, BK)
        b_dcos = tl.sum(first * dfirst + second * dsecond, 1)
        b_dsin = tl.sum(first * dsecond - second * dfirst, 1)
        p_cos, m_turn = turns(dcos, i_t, i_h, H, there, o_a, A, RP, BR)
        p_sin, _ = turns(dsin, i_t, i_h, H, there, o_a, A, RP, BR)
        if KEYS:
            b_dcos += tl.load(p_cos, mask=m_turn, other=0.0)
            b_dsin += tl.load(p_sin, mask=m_turn, other=0.0)
        tl.store(p_cos, b_dcos, mask=m_turn)
        tl.store(p_sin, b_dsin, mask=m_turn)
        b_cos, b_sin = rotation(cos, sin, i_t, i_h, H, there, o_a, A, RP, BR)
        b_pairs = tl.join(dfirst * b_cos + dsecond * b_sin, dsecond * b_cos - dfirst * b_sin)
        b_d = tl.reshape(b_pairs, [BR // RP, RP, BK])
        b_dx += b_d
        p_bias = dbias + i_s * R * K + ((o_rank * K)[:, None] + o_k[None, :])
        tl.store(p_bias, tl.sum(b_d, 0), mask=(o_rank < R)[:, None] & (o_k < K)[None, :])
    p_dx, m_dx = shared_rows(dx, i_t, group, G, there, R, i_k * BK + tl.arange(0, BK), K, RP, BR)
    tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=m_dx)
