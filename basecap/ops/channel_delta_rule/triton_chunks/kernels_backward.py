"""The delta rule by channel in chunks in Triton, backward: what follows the walk from the end; layouts of kernels.py.

v, do, dv and written are [B, T, H, V], states between chunks [B, M, H, K, V]. No product has a transposed product as
its operand: Triton 3.4 to 3.7.0 compiles those to wrong results on Hopper.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_chunks import store_rows, values
from basecap.ops._recurrence.kernels_joins import in_right, join, joined
from basecap.ops._recurrence.kernels_tiles import matrix, rows, state
from basecap.ops.channel_delta_rule.triton_chunks.kernels import edges, log_decays
from basecap.ops.kernels_shared import add_product, exp


@triton.jit
def values_bwd_kernel(
    do, v, found, write, inverse, value_pairs, states, later, written, dv,
    T, H, K, V, M,
    PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV columns of what a chunk's tokens write, and of the gradient of v, that of the systems' right sides."""
    i_h, i_m, i_b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t, o_k = i_m * BT + tl.arange(0, BT), tl.arange(0, BK)
    o_v = tl.program_id(0) // H * BV + tl.arange(0, BV)
    p_do, m_v = rows(do, i_b, o_t, T, i_h, H, o_v, V)
    p_v, _ = rows(v, i_b, o_t, T, i_h, H, o_v, V)
    p_found, m_k = rows(found, i_b, o_t, T, i_h, H, o_k, K)
    p_write, _ = rows(write, i_b, o_t, T, i_h, H, o_k, K)
    p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
    p_later, _ = state(later, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
    b_inverse = tl.load(matrix(inverse, i_b, i_m, i_h, M, H, BT))
    b_x = tl.dot(b_inverse, tl.load(p_v, mask=m_v, other=0.0), input_precision=PRECISION)
    b_found, b_state = tl.load(p_found, mask=m_k, other=0.0), tl.load(p_state, mask=m_state, other=0.0)
    store_rows(written, i_b, o_t, T, i_h, H, o_v, V, add_product(b_x, b_found, b_state, PRECISION))

    b_pairs = tl.load(matrix(value_pairs, i_b, i_m, i_h, M, H, BT))
    b_x = tl.dot(tl.trans(b_pairs), tl.load(p_do, mask=m_v, other=0.0), input_precision=PRECISION)
    b_write, b_later = tl.load(p_write, mask=m_k, other=0.0), tl.load(p_later, mask=m_state, other=0.0)
    store_rows(dv, i_b, o_t, T, i_h, H, o_v, V, add_product(b_x, b_write, b_later, PRECISION))


@triton.jit
def pairs_bwd(dx, written, i_b, o_t, T, i_h, H, V, PRECISION: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Gradient of the scores of pairs of tokens: of each pair the later one reads, whichever of them is the row."""
    b_below = tl.zeros([BT, BT], dtype=tl.float32)
    b_above = tl.zeros([BT, BT], dtype=tl.float32)
    for column in range(0, V, BV):
        o_v = column + tl.arange(0, BV)
        p_dx, m_v = rows(dx, i_b, o_t, T, i_h, H, o_v, V)
        p_x, _ = rows(written, i_b, o_t, T, i_h, H, o_v, V)
        b_dx, b_x = tl.load(p_dx, mask=m_v, other=0.0), tl.load(p_x, mask=m_v, other=0.0)
        b_below += tl.dot(b_dx, tl.trans(b_x), input_precision=PRECISION)
        b_above += tl.dot(b_x, tl.trans(b_dx), input_precision=PRECISION)
    return tl.where(o_t[:, None] >= o_t[None, :], b_below, b_above)


@triton.jit
def between(o_t, level: tl.constexpr):
    """[t, x]: whether the decay at t is part of what x reads or writes across its block's border with its neighbour.

    In a right block x reads over the tokens up to its own, in a left one x writes over those behind it.
    """
    beyond = tl.where(in_right(o_t, level)[None, :], o_t[:, None] <= o_t[None, :], o_t[:, None] > o_t[None, :])
    return tl.where(((o_t >> level)[:, None] == (o_t >> level)[None, :]) & beyond, 1.0, 0.0)


@triton.jit
def keys_bwd_kernel(
    do, q, k, erased, log_decay, starts, written, dv, states, later, dq, dk, derased, dlog,
    T, H, K, V, M,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, SHARE: tl.constexpr, LEVELS: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of BK channels of q, k, `erased` and the log decays in a chunk.

    Those of the log decays are sums of the shares of all products that a decay is part of, never differences.
    """
    i_h, i_m, i_b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_c, o_k = tl.arange(0, BT), tl.program_id(0) // H * BK + tl.arange(0, BK)
    o_t = i_m * BT + o_c
    low = written.dtype.element_ty
    b_q = values(q, i_b, o_t, T, i_h, H, o_k, K)
    b_k = values(k, i_b, o_t, T, i_h, H, o_k, K)
    b_e = values(erased, i_b, o_t, T, i_h, H, o_k, K)
    b_from, b_to, b_across = edges(log_decay, starts, i_b, i_m, T, i_h, H, o_k, K, EXACT, BT)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_de = tl.zeros([BT, BK], dtype=tl.float32)
    b_down = tl.zeros([BT], dtype=tl.float32)
    b_passed = tl.zeros([BK], dtype=tl.float32)
    for column in range(0, V, BV):
        o_v = column + tl.arange(0, BV)
        p_do, m_v = rows(do, i_b, o_t, T, i_h, H, o_v, V)
        p_dv, _ = rows(dv, i_b, o_t, T, i_h, H, o_v, V)
        p_x, _ = rows(written, i_b, o_t, T, i_h, H, o_v, V)
        p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        p_later, _ = state(later, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        b_state, b_later = tl.load(p_state, mask=m_state, other=0.0), tl.load(p_later, mask=m_state, other=0.0)
        b_passed += tl.sum(b_state.to(tl.float32) * b_later.to(tl.float32), 1)
        b_state, b_later = tl.trans(b_state), tl.trans(b_later)
        b_do, b_x = tl.load(p_do, mask=m_v, other=0.0), tl.load(p_x, mask=m_v, other=0.0)
        b_down += tl.sum(b_do.to(tl.float32) * b_x.to(tl.float32), 1)
        b_dq += tl.dot(b_do, b_state, input_precision=PRECISION)
        b_de -= tl.dot(tl.load(p_dv, mask=m_v, other=0.0), b_state, input_precision=PRECISION)
        b_dk += tl.dot(b_x, b_later, input_precision=PRECISION)
    b_dq *= b_from
    b_de *= b_from
    b_dk *= b_to
    upto = tl.where(o_c[:, None] <= o_c[None, :], 1.0, 0.0).to(SHARE)
    b_dlog = tl.dot(upto, (b_q * b_dq + b_e * b_de).to(SHARE), input_precision=PRECISION)
    behind = tl.where(o_c[:, None] > o_c[None, :], 1.0, 0.0).to(SHARE)
    b_dlog = tl.dot(behind, (b_k * b_dk).to(SHARE), b_dlog, input_precision=PRECISION)
    b_dlog += (b_across * b_passed)[None, :]
    b_dq += b_down[:, None] * b_k
    b_dk += b_down[:, None] * b_q

    b_dreads = pairs_bwd(do, written, i_b, o_t, T, i_h, H, V, PRECISION, BT, BV)
    b_derases = -pairs_bwd(dv, written, i_b, o_t, T, i_h, H, V, PRECISION, BT, BV)
    b_all = log_decays(log_decay, starts, i_b, o_t, T, i_h, H, o_k, K)
    b_from = b_all
    b_to = tl.zeros([BT, BK], dtype=tl.float32)
    for level in tl.static_range(LEVELS):
        right = in_right(o_c, level)[:, None]
        b_decay = exp(tl.where(right, b_from, b_to), EXACT)
        b_both = tl.where(right, b_q, b_k) * b_decay
        b_pairs = tl.where(joined(o_c, level), b_dreads, 0.0).to(low)
        b_dboth = tl.dot(b_pairs, b_both.to(low), input_precision=PRECISION)
        b_dq += tl.where(right, b_dboth * b_decay, 0.0)
        b_dk += tl.where(right, 0.0, b_dboth * b_decay)
        b_share = b_both * b_dboth
        b_both = tl.where(right, b_e, b_k) * b_decay
        b_pairs = tl.where(joined(o_c, level), b_derases, 0.0).to(low)
        b_dboth = tl.dot(b_pairs, b_both.to(low), input_precision=PRECISION)
        b_de += tl.where(right, b_dboth * b_decay, 0.0)
        b_dk += tl.where(right, 0.0, b_dboth * b_decay)
        b_share += b_both * b_dboth
        if level == 0:
            b_dlog += tl.where(right, b_share, 0.0)
        else:
            b_dlog = tl.dot(between(o_c, level).to(SHARE), b_share.to(SHARE), b_dlog, input_precision=PRECISION)
        b_from, b_to, b_all = join(b_from, b_to, b_all, level)
    store_rows(dq, i_b, o_t, T, i_h, H, o_k, K, b_dq)
    store_rows(dk, i_b, o_t, T, i_h, H, o_k, K, b_dk)
    store_rows(derased, i_b, o_t, T, i_h, H, o_k, K, b_de)
    store_rows(dlog, i_b, o_t, T, i_h, H, o_k, K, b_dlog)
