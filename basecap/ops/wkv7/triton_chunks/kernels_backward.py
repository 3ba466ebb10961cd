"""The RWKV-7 recurrence by chunks in Triton, backward: what follows the walk from the end. Layouts as in kernels.py.

No product has a transposed product as its operand: Triton 3.4 to 3.7.0 compiles those to wrong results on Hopper. So
gradients of scores are taken twice, once the other way round, and the rest goes through memory.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_chunks import store_rows, values
from basecap.ops._recurrence.kernels_tiles import matrix, rows, state
from basecap.ops.wkv7.triton_chunks.kernels import before, edges, gates


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
    store_rows(recalled, i_b, o_t, T, i_h, H, o_v, V, tl.dot(b_recall, b_state, b_x, input_precision=PRECISION))

    b_do, b_later = tl.load(p_do, mask=m_v, other=0.0), tl.load(p_later, mask=m_state, other=0.0)
    b_pairs = tl.load(matrix(adjoint_pairs, i_b, i_m, i_h, M, H, BT))
    b_x = tl.dot(tl.trans(b_pairs), b_do, input_precision=PRECISION)
    b_adjoint = tl.load(p_adjoint, mask=m_k, other=0.0)
    store_rows(drecalled, i_b, o_t, T, i_h, H, o_v, V, tl.dot(b_adjoint, b_later, b_x, input_precision=PRECISION))
    b_pairs = tl.load(matrix(read_pairs, i_b, i_m, i_h, M, H, BT))
    b_x = tl.dot(tl.trans(b_pairs), b_do, input_precision=PRECISION)
    b_write = tl.load(p_write, mask=m_k, other=0.0)
    store_rows(dv, i_b, o_t, T, i_h, H, o_v, V, tl.dot(b_write, b_later, b_x, input_precision=PRECISION))


@triton.jit
def read_bwd(
    dx, v, recalled, states, b_k, b_b, entered, b_start, ids, i_b, i_m, o_t, T, i_h, H, o_k, K, V, M,
    PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradient of what is read with, from the state and from earlier tokens; those of the own token's two scores."""
    b_pairs_k = tl.zeros([BT, BT], dtype=tl.float32)
    b_pairs_b = tl.zeros([BT, BT], dtype=tl.float32)
    b_read = tl.zeros([BT, BK], dtype=tl.float32)
    for column in range(0, V, BV):
        o_v = column + tl.arange(0, BV)
        p_dx, m_v = rows(dx, i_b, o_t, T, i_h, H, o_v, V)
        p_v, _ = rows(v, i_b, o_t, T, i_h, H, o_v, V)
        p_u, _ = rows(recalled, i_b, o_t, T, i_h, H, o_v, V)
        p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        b_dx = tl.load(p_dx, mask=m_v, other=0.0)
        b_pairs_k += tl.dot(b_dx, tl.trans(tl.load(p_v, mask=m_v, other=0.0)), input_precision=PRECISION)
        b_pairs_b += tl.dot(b_dx, tl.trans(tl.load(p_u, mask=m_v, other=0.0)), input_precision=PRECISION)
        b_read += tl.dot(b_dx, tl.trans(tl.load(p_state, mask=m_state, other=0.0)), input_precision=PRECISION)
    earlier = before(ids, i_b, o_t, T, False)
    b_read *= tl.where(entered[:, None], b_start[None, :], 0.0)
    b_read = tl.dot(tl.where(earlier, b_pairs_k, 0.0).to(b_k.dtype), b_k, b_read, input_precision=PRECISION)
    b_read = tl.dot(tl.where(earlier, b_pairs_b, 0.0).to(b_b.dtype), b_b, b_read, input_precision=PRECISION)
    own = o_t[:, None] == o_t[None, :]
    return b_read, tl.sum(tl.where(own, b_pairs_k, 0.0), 1), tl.sum(tl.where(own, b_pairs_b, 0.0), 1)


@triton.jit
def write_bwd(
    x, do, drecalled, later, b_r, b_a, left, b_end, ids, i_b, i_m, o_t, T, i_h, H, o_k, K, V, M,
    PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradient of where x, values or what is recalled, is written: by later tokens' reads and all, by the state."""
    b_pairs_r = tl.zeros([BT, BT], dtype=tl.float32)
    b_pairs_a = tl.zeros([BT, BT], dtype=tl.float32)
    b_left = tl.zeros([BT, BK], dtype=tl.float32)
    for column in range(0, V, BV):
        o_v = column + tl.arange(0, BV)
        p_x, m_v = rows(x, i_b, o_t, T, i_h, H, o_v, V)
        p_do, _ = rows(do, i_b, o_t, T, i_h, H, o_v, V)
        p_du, _ = rows(drecalled, i_b, o_t, T, i_h, H, o_v, V)
        p_later, m_state = state(later, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        b_x = tl.load(p_x, mask=m_v, other=0.0)
        b_pairs_r += tl.dot(b_x, tl.trans(tl.load(p_do, mask=m_v, other=0.0)), input_precision=PRECISION)
        b_pairs_a += tl.dot(b_x, tl.trans(tl.load(p_du, mask=m_v, other=0.0)), input_precision=PRECISION)
        b_left += tl.dot(b_x, tl.trans(tl.load(p_later, mask=m_state, other=0.0)), input_precision=PRECISION)
    later_on = before(ids, i_b, o_t, T, True)
    b_left *= tl.where(left[:, None], b_end[None, :], 0.0)
    b_all = tl.dot(tl.where(later_on, b_pairs_r, 0.0).to(b_r.dtype), b_r, b_left, input_precision=PRECISION)
    b_all = tl.dot(tl.where(later_on, b_pairs_a, 0.0).to(b_a.dtype), b_a, b_all, input_precision=PRECISION)
    return b_all, b_left


@triton.jit
def keys_bwd_kernel(
    do, r, log_decay, k, v, a, b, ids, recalled, drecalled, states, later, across, dr, dlog, dk, da, db,
    T, H, K, V, M,
    SUM: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of BK channels of r, the log decays, k, a and b in a chunk.

    The log decay at j scales what is read from j on, minus what was also written from j on, and what was written before
    it to the state after the chunk. What both of the first hold are the same rounded numbers, added up in float32:
    of those of r.dr - k.dk, say, rounding errors of half precision would remain. A token's read of its own writes,
    which nothing scales, stays out of the sums.
    """
    i_h, i_m, i_b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = i_m * BT + tl.arange(0, BT)
    o_k = tl.program_id(0) // H * BK + tl.arange(0, BK)
    entered, left, _passed = edges(ids, i_b, i_m, o_t, T, BT)
    b_after, b_before, b_to, b_start, b_end = gates(log_decay, i_b, o_t, T, i_h, H, o_k, K, SUM, BT)
    b_r = (values(r, i_b, o_t, T, i_h, H, o_k, K) * b_after).to(WIDE)
    b_a = (values(a, i_b, o_t, T, i_h, H, o_k, K) * b_before).to(WIDE)
    b_k = (values(k, i_b, o_t, T, i_h, H, o_k, K) * b_to).to(WIDE)
    b_b = (values(b, i_b, o_t, T, i_h, H, o_k, K) * b_to).to(WIDE)

    b_d, b_own_k, b_own_b = read_bwd(
        do, v, recalled, states, b_k, b_b, entered, b_start, ids, i_b, i_m, o_t, T, i_h, H, o_k, K, V, M,
        PRECISION, BT, BK, BV,
    )  # fmt: skip
    b_own = b_own_k[:, None] * b_k + b_own_b[:, None] * b_b
    store_rows(dr, i_b, o_t, T, i_h, H, o_k, K, (b_d + b_own) * b_after)
    b_scaled = b_r * b_d
    b_d, _own_k, _own_b = read_bwd(
        drecalled, v, recalled, states, b_k, b_b, entered, b_start, ids, i_b, i_m, o_t, T, i_h, H, o_k, K, V, M,
        PRECISION, BT, BK, BV,
    )  # fmt: skip
    store_rows(da, i_b, o_t, T, i_h, H, o_k, K, b_d * b_before)
    # Asked for before the token's decay, unlike read: not from j on, but behind it.
    b_asked = b_a * b_d
    b_scaled += b_asked

    b_d, b_left = write_bwd(
        v, do, drecalled, later, b_r, b_a, left, b_end, ids, i_b, i_m, o_t, T, i_h, H, o_k, K, V, M,
        PRECISION, BT, BK, BV,
    )  # fmt: skip
    store_rows(dk, i_b, o_t, T, i_h, H, o_k, K, (b_d + b_own_k[:, None] * b_r) * b_to)
    b_scaled -= b_k * b_d
    b_passed = tl.sum(b_k * b_left, 0)
    b_d, b_left = write_bwd(
        recalled, do, drecalled, later, b_r, b_a, left, b_end, ids, i_b, i_m, o_t, T, i_h, H, o_k, K, V, M,
        PRECISION, BT, BK, BV,
    )  # fmt: skip
    store_rows(db, i_b, o_t, T, i_h, H, o_k, K, (b_d + b_own_b[:, None] * b_r) * b_to)
    b_scaled -= b_b * b_d
    b_passed += tl.sum(b_b * b_left, 0)

    b_across = tl.load(across + ((i_b * M + i_m) * H + i_h) * K + o_k, mask=o_k < K, other=0.0)
    for column in range(0, V, BV):
        o_v = column + tl.arange(0, BV)
        p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        p_later, _ = state(later, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        b_state = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)
        b_later = tl.load(p_later, mask=m_state, other=0.0).to(tl.float32)
        b_passed += b_across * tl.sum(b_state * b_later, 1)
    if ids is None:
        b_dlog = tl.cumsum(b_scaled, 0, reverse=True) - b_asked
    else:
        # A cumulated sum would carry what is left of other segments, their rounding errors, along.
        b_same = tl.where(before(ids, i_b, o_t, T, True), 1.0, 0.0)
        b_dlog = tl.dot(b_same, b_scaled, b_scaled - b_asked, input_precision=PRECISION)
    b_dlog += tl.where(left[:, None], b_passed[None, :], 0.0)
    store_rows(dlog, i_b, o_t, T, i_h, H, o_k, K, b_dlog)
