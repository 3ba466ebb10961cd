"""The RWKV-7 recurrence by chunks in Triton, backward: what follows the walk from the end. Layouts as in kernels.py.

No product has a transposed product as its operand: Triton 3.4 to 3.7.0 compiles those to wrong results on Hopper. So
gradients of scores are taken twice, once the other way round, and the rest goes through memory.
"""

import triton
import triton.language as tl

from basecap.ops.delta_rule.kernels import matrix, rows, state
from basecap.ops.wkv7.kernels import gates, keep, segments, values


@triton.jit
def values_bwd_kernel(
    do, v, recall, adjoint, write, recall_pairs, adjoint_pairs, read_pairs, states, later, recalled, drecalled, dv,
    T, H, K, V, M,
    PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV columns of what a chunk's tokens recall, of the gradient of the systems' right sides and of that of v."""
    i_h, i_m, i_b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t, o_k = i_m * BT + tl.arange(0, BT), tl.arange(0, BK)
    o_v = tl.program_id(0) // H * BV + tl.arange(0, BV)
    p_do, m_v = rows(do, i_b, o_t, T, i_h, H, o_v, V)
    p_v, _ = rows(v, i_b, o_t, T, i_h, H, o_v, V)
    p_recall, m_k = rows(recall, i_b, o_t, T, i_h, H, o_k, K)
    p_adjoint, _ = rows(adjoint, i_b, o_t, T, i_h, H, o_k, K)
    p_write, _ = rows(write, i_b, o_t, T, i_h, H, o_k, K)
    p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
    p_later, _ = state(later, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
    b_pairs = tl.load(matrix(recall_pairs, i_b, i_m, i_h, M, H, BT))
    b_x = tl.dot(b_pairs, tl.load(p_v, mask=m_v, other=0.0), input_precision=PRECISION)
    b_recall, b_state = tl.load(p_recall, mask=m_k, other=0.0), tl.load(p_state, mask=m_state, other=0.0)
    keep(recalled, i_b, o_t, T, i_h, H, o_v, V, tl.dot(b_recall, b_state, b_x, input_precision=PRECISION))

    b_do, b_later = tl.load(p_do, mask=m_v, other=0.0), tl.load(p_later, mask=m_state, other=0.0)
    b_pairs = tl.load(matrix(adjoint_pairs, i_b, i_m, i_h, M, H, BT))
    b_x = tl.dot(tl.trans(b_pairs), b_do, input_precision=PRECISION)
    b_adjoint = tl.load(p_adjoint, mask=m_k, other=0.0)
    keep(drecalled, i_b, o_t, T, i_h, H, o_v, V, tl.dot(b_adjoint, b_later, b_x, input_precision=PRECISION))
    b_pairs = tl.load(matrix(read_pairs, i_b, i_m, i_h, M, H, BT))
    b_x = tl.dot(tl.trans(b_pairs), b_do, input_precision=PRECISION)
    b_write = tl.load(p_write, mask=m_k, other=0.0)
    keep(dv, i_b, o_t, T, i_h, H, o_v, V, tl.dot(b_write, b_later, b_x, input_precision=PRECISION))


@triton.jit
def keys_bwd_kernel(
    do, r, log_decay, k, v, a, b, ids, recalled, drecalled, states, later, across, dr, dlog, dk, da, db,
    T, H, K, V, M,
    SUM: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of BK channels of r, the log decays, k, a and b in a chunk.

    The log decay at j scales what is read from j on, less what was also written from j on, and what was written before
    it to the state after the chunk. What both of the first hold are the same rounded numbers, added up in float32:
    of those of r.dr - k.dk, say, rounding errors of half precision would remain.
    """
    i_h, i_m, i_b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_c = tl.arange(0, BT)
    o_t = i_m * BT + o_c
    o_k = tl.program_id(0) // H * BK + tl.arange(0, BK)
    seen, entered, left, _ = segments(ids, i_b, i_m, o_t, T, BT)
    b_after, b_before, b_to, b_start, b_end = gates(log_decay, i_b, o_t, T, i_h, H, o_k, K, SUM, BT)
    b_r = (values(r, i_b, o_t, T, i_h, H, o_k, K) * b_after).to(WIDE)
    b_a = (values(a, i_b, o_t, T, i_h, H, o_k, K) * b_before).to(WIDE)
    b_k = (values(k, i_b, o_t, T, i_h, H, o_k, K) * b_to).to(WIDE)
    b_b = (values(b, i_b, o_t, T, i_h, H, o_k, K) * b_to).to(WIDE)

    b_drk = tl.zeros([BT, BT], dtype=tl.float32)
    b_drb = tl.zeros([BT, BT], dtype=tl.float32)
    b_dak = tl.zeros([BT, BT], dtype=tl.float32)
    b_dab = tl.zeros([BT, BT], dtype=tl.float32)
    b_dr = tl.zeros([BT, BK], dtype=tl.float32)
    b_da = tl.zeros([BT, BK], dtype=tl.float32)
    b_passed = tl.zeros([BK], dtype=tl.float32)
    for column in range(0, V, BV):
        o_v = column + tl.arange(0, BV)
        p_do, m_v = rows(do, i_b, o_t, T, i_h, H, o_v, V)
        p_v, _ = rows(v, i_b, o_t, T, i_h, H, o_v, V)
        p_u, _ = rows(recalled, i_b, o_t, T, i_h, H, o_v, V)
        p_du, _ = rows(drecalled, i_b, o_t, T, i_h, H, o_v, V)
        p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        p_later, _ = state(later, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        b_do, b_du = tl.load(p_do, mask=m_v, other=0.0), tl.load(p_du, mask=m_v, other=0.0)
        b_v, b_u = tl.load(p_v, mask=m_v, other=0.0), tl.load(p_u, mask=m_v, other=0.0)
        b_state = tl.load(p_state, mask=m_state, other=0.0)
        b_later = tl.load(p_later, mask=m_state, other=0.0)
        b_passed += tl.sum(b_state.to(tl.float32) * b_later.to(tl.float32), 1)
        b_drk += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_drb += tl.dot(b_do, tl.trans(b_u), input_precision=PRECISION)
        b_dak += tl.dot(b_du, tl.trans(b_v), input_precision=PRECISION)
        b_dab += tl.dot(b_du, tl.trans(b_u), input_precision=PRECISION)
        b_dr += tl.dot(b_do, tl.trans(b_state), input_precision=PRECISION)
        b_da += tl.dot(b_du, tl.trans(b_state), input_precision=PRECISION)
    earlier = seen & (o_c[:, None] > o_c[None, :])
    b_dr *= tl.where(entered[:, None], b_start[None, :], 0.0)
    b_da *= tl.where(entered[:, None], b_start[None, :], 0.0)
    b_own_k = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_drk, 0.0), 1)
    b_own_b = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_drb, 0.0), 1)
    b_dr = tl.dot(tl.where(earlier, b_drk, 0.0).to(WIDE), b_k, b_dr, input_precision=PRECISION)
    b_dr = tl.dot(tl.where(earlier, b_drb, 0.0).to(WIDE), b_b, b_dr, input_precision=PRECISION)
    b_da = tl.dot(tl.where(earlier, b_dak, 0.0).to(WIDE), b_k, b_da, input_precision=PRECISION)
    b_da = tl.dot(tl.where(earlier, b_dab, 0.0).to(WIDE), b_b, b_da, input_precision=PRECISION)
    b_own = b_k * b_own_k[:, None] + b_b * b_own_b[:, None]
    keep(dr, i_b, o_t, T, i_h, H, o_k, K, (b_dr + b_own) * b_after)
    keep(da, i_b, o_t, T, i_h, H, o_k, K, b_da * b_before)
    b_asked = b_a.to(tl.float32) * b_da
    b_from = b_r.to(tl.float32) * b_dr + b_asked

    b_drk = tl.zeros([BT, BT], dtype=tl.float32)
    b_drb = tl.zeros([BT, BT], dtype=tl.float32)
    b_dak = tl.zeros([BT, BT], dtype=tl.float32)
    b_dab = tl.zeros([BT, BT], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_db = tl.zeros([BT, BK], dtype=tl.float32)
    for column in range(0, V, BV):
        o_v = column + tl.arange(0, BV)
        p_do, m_v = rows(do, i_b, o_t, T, i_h, H, o_v, V)
        p_v, _ = rows(v, i_b, o_t, T, i_h, H, o_v, V)
        p_u, _ = rows(recalled, i_b, o_t, T, i_h, H, o_v, V)
        p_du, _ = rows(drecalled, i_b, o_t, T, i_h, H, o_v, V)
        p_later, m_state = state(later, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        b_do, b_du = tl.load(p_do, mask=m_v, other=0.0), tl.load(p_du, mask=m_v, other=0.0)
        b_v, b_u = tl.load(p_v, mask=m_v, other=0.0), tl.load(p_u, mask=m_v, other=0.0)
        b_later = tl.load(p_later, mask=m_state, other=0.0)
        b_drk += tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        b_drb += tl.dot(b_u, tl.trans(b_do), input_precision=PRECISION)
        b_dak += tl.dot(b_v, tl.trans(b_du), input_precision=PRECISION)
        b_dab += tl.dot(b_u, tl.trans(b_du), input_precision=PRECISION)
        b_dk += tl.dot(b_v, tl.trans(b_later), input_precision=PRECISION)
        b_db += tl.dot(b_u, tl.trans(b_later), input_precision=PRECISION)
    earlier = seen & (o_c[:, None] < o_c[None, :])
    b_dk *= tl.where(left[:, None], b_end[None, :], 0.0)
    b_db *= tl.where(left[:, None], b_end[None, :], 0.0)
    b_left = b_k.to(tl.float32) * b_dk + b_b.to(tl.float32) * b_db
    b_dk = tl.dot(tl.where(earlier, b_drk, 0.0).to(WIDE), b_r, b_dk, input_precision=PRECISION)
    b_dk = tl.dot(tl.where(earlier, b_dak, 0.0).to(WIDE), b_a, b_dk, input_precision=PRECISION)
    b_db = tl.dot(tl.where(earlier, b_drb, 0.0).to(WIDE), b_r, b_db, input_precision=PRECISION)
    b_db = tl.dot(tl.where(earlier, b_dab, 0.0).to(WIDE), b_a, b_db, input_precision=PRECISION)
    keep(dk, i_b, o_t, T, i_h, H, o_k, K, (b_dk + b_r * b_own_k[:, None]) * b_to)
    keep(db, i_b, o_t, T, i_h, H, o_k, K, (b_db + b_r * b_own_b[:, None]) * b_to)

    b_from -= b_k.to(tl.float32) * b_dk + b_b.to(tl.float32) * b_db
    b_across = tl.load(across + ((i_b * M + i_m) * H + i_h) * K + o_k, mask=o_k < K, other=0.0)
    b_dlog = tl.cumsum(b_from, 0, reverse=True) - b_asked + (tl.sum(b_left, 0) + b_across * b_passed)[None, :]
    keep(dlog, i_b, o_t, T, i_h, H, o_k, K, b_dlog)
