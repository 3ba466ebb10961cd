"""The gated delta rule in Triton, backward: the walk over the chunks from the end, then every chunk by itself.

Layouts as in kernels.py. No product has a transposed product as its operand: Triton 3.4 to 3.7.0 compiles those to
wrong results on Hopper. So what is needed transposed goes through memory.
"""

import triton
import triton.language as tl

from basecap.ops.delta_rule.triton_kernels.kernels import matrix, rows, state, within


@triton.jit
def walk_bwd_kernel(
    do, dlast, q, k, beta, inverse, scores, from_start, to_end, dright, later, dfirst,
    T, H, K, V, M,
    PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Walk from the last chunk to the first with BV columns of the state's gradient.

    Writes the gradients of the systems' right sides, of the states after the chunks (`later`) and of the first state;
    `dlast` may be None for zeros, `dfirst` where it is not wanted.
    """
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k = tl.arange(0, BK)
    b_later = tl.zeros([BK, BV], dtype=tl.float32)
    if dlast is not None:
        p_last, m_state = state(dlast, i_b, 0, i_h, 1, H, o_k, K, o_v, V)
        b_later += tl.load(p_last, mask=m_state, other=0.0).to(tl.float32)
    for i in range(M):
        i_m = M - 1 - i
        o_t = i_m * BT + tl.arange(0, BT)
        m_t = o_t < T
        p_row = (i_b * H + i_h) * T
        p_q, m_k = rows(q, i_b, o_t, T, i_h, H, o_k, K)
        p_k, _ = rows(k, i_b, o_t, T, i_h, H, o_k, K)
        p_do, m_do = rows(do, i_b, o_t, T, i_h, H, o_v, V)
        b_q = tl.load(p_q, mask=m_k, other=0.0)
        b_k = tl.load(p_k, mask=m_k, other=0.0)
        b_do = tl.load(p_do, mask=m_do, other=0.0)
        b_inverse = tl.load(matrix(inverse, i_b, i_m, i_h, M, H, BT))
        b_scores = tl.load(matrix(scores, i_b, i_m, i_h, M, H, BT))
        b_beta = tl.load(beta + (i_b * T + o_t) * H + i_h, mask=m_t, other=0.0).to(tl.float32)
        b_from = tl.load(from_start + p_row + o_t, mask=m_t, other=0.0)
        b_to = tl.load(to_end + p_row + o_t, mask=m_t, other=0.0)
        across = tl.load(from_start + p_row + tl.minimum((i_m + 1) * BT, T) - 1)

        b_low = b_later.to(b_k.dtype)
        p_later, m_state = state(later, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        tl.store(p_later, b_later, mask=m_state)
        b_du = tl.dot(b_k, b_low, input_precision=PRECISION) * b_to[:, None]
        b_du += tl.dot(tl.trans(b_scores), b_do, input_precision=PRECISION)
        b_dright = tl.dot(tl.trans(b_inverse), b_du.to(b_k.dtype), input_precision=PRECISION)
        p_dright, m_dright = rows(dright, i_b, o_t, T, i_h, H, o_v, V)
        tl.store(p_dright, b_dright.to(b_k.dtype), mask=m_dright)
        b_read = (b_do * b_from[:, None]).to(b_k.dtype)
        b_kept = (b_dright * (-b_beta * b_from)[:, None]).to(b_k.dtype)
        b_later = tl.dot(tl.trans(b_q), b_read, b_later * across, input_precision=PRECISION)
        b_later = tl.dot(tl.trans(b_k), b_kept, b_later, input_precision=PRECISION)
    if dfirst is not None:
        p_first, m_state = state(dfirst, i_b, 0, i_h, 1, H, o_k, K, o_v, V)
        tl.store(p_first, b_later, mask=m_state)


@triton.jit
def pairs_bwd_kernel(
    do, q, k, v, beta, log_decay, ids, u, dright, dscores, dsystem, dv, dbeta_pairs, dlog_pairs,
    T, H, K, V, M,
    PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's scores and system, both without their decays, of v, and the pairs' parts of dbeta, dlog.

    These parts are [B, H, T] float32; `scan_bwd_kernel` adds the states' parts.
    """
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = i_m * BT + tl.arange(0, BT)
    p_row = (i_b * H + i_h) * T + o_t
    b_beta = tl.load(beta + (i_b * T + o_t) * H + i_h, mask=o_t < T, other=0.0).to(tl.float32)
    b_dscores = tl.zeros([BT, BT], dtype=tl.float32)
    b_dsystem = tl.zeros([BT, BT], dtype=tl.float32)
    b_dbeta = tl.zeros([BT], dtype=tl.float32)
    for start in range(0, V, BV):
        o_v = start + tl.arange(0, BV)
        p_do, m_v = rows(do, i_b, o_t, T, i_h, H, o_v, V)
        p_v, _ = rows(v, i_b, o_t, T, i_h, H, o_v, V)
        p_u, _ = rows(u, i_b, o_t, T, i_h, H, o_v, V)
        p_dright, _ = rows(dright, i_b, o_t, T, i_h, H, o_v, V)
        p_dv, _ = rows(dv, i_b, o_t, T, i_h, H, o_v, V)
        b_u = tl.load(p_u, mask=m_v, other=0.0)
        b_do = tl.load(p_do, mask=m_v, other=0.0)
        b_dright = tl.load(p_dright, mask=m_v, other=0.0)
        b_dscores += tl.dot(b_do, tl.trans(b_u), input_precision=PRECISION)
        b_dsystem -= tl.dot(b_dright, tl.trans(b_u), input_precision=PRECISION)
        b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
        b_dbeta += tl.sum(b_dright * b_v, 1)
        tl.store(p_dv, (b_dright * b_beta[:, None]).to(dv.dtype.element_ty), mask=m_v)

    b_scores = tl.zeros([BT, BT], dtype=tl.float32)
    b_keys = tl.zeros([BT, BT], dtype=tl.float32)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        p_q, m_k = rows(q, i_b, o_t, T, i_h, H, o_k, K)
        p_k, _ = rows(k, i_b, o_t, T, i_h, H, o_k, K)
        b_k = tl.load(p_k, mask=m_k, other=0.0)
        if log_decay is not None:
            b_q = tl.load(p_q, mask=m_k, other=0.0)
            b_scores += tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_keys += tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)

    earlier = o_t[:, None] > o_t[None, :]
    b_within = within(log_decay, ids, i_b, o_t, T, i_h, H)
    b_dscores *= b_within
    b_dsystem = tl.where(earlier, b_dsystem * b_within, 0.0)
    b_dbeta += tl.sum(b_dsystem * b_keys, 1)
    b_dsystem *= b_beta[:, None]
    tl.store(matrix(dscores, i_b, i_m, i_h, M, H, BT), b_dscores.to(dscores.dtype.element_ty))
    tl.store(matrix(dsystem, i_b, i_m, i_h, M, H, BT), b_dsystem.to(dsystem.dtype.element_ty))
    tl.store(dbeta_pairs + p_row, b_dbeta, mask=o_t < T)
    if log_decay is not None:
        # The decay at j stands between every s < j and t >= j. Summing pairs (t, s) over t first, then over s, adds up
        # just those; differences of sums over all pairs would leave the others' rounding errors.
        b_pairs = tl.where(earlier, b_dscores * b_scores + b_dsystem * b_keys, 0.0)
        b_after = tl.where(o_t[:, None] <= o_t[None, :], 1.0, 0.0)
        b_pairs = tl.dot(b_after, b_pairs, input_precision=PRECISION)
        tl.store(dlog_pairs + p_row, tl.sum(tl.where(earlier, b_pairs, 0.0), 1), mask=o_t < T)


@triton.jit
def scan_bwd_kernel(
    do, q, k, beta, u, dright, dscores, dsystem, from_start, to_end, states, later, dq, dk, dbeta_pairs, dlog_pairs,
    dbeta, dlog,
    T, H, K, V, M,
    PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, beta and, where `dlog` is not None, of the log decays."""
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = i_m * BT + tl.arange(0, BT)
    m_t = o_t < T
    p_row = (i_b * H + i_h) * T
    b_beta = tl.load(beta + (i_b * T + o_t) * H + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_from = tl.load(from_start + p_row + o_t, mask=m_t, other=0.0)
    b_to = tl.load(to_end + p_row + o_t, mask=m_t, other=0.0)
    b_dbeta = tl.load(dbeta_pairs + p_row + o_t, mask=m_t, other=0.0)
    b_reads = tl.zeros([BT], dtype=tl.float32)
    b_writes = tl.zeros([BT], dtype=tl.float32)
    b_passes = tl.zeros([BK], dtype=tl.float32)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        b_dkept = tl.zeros([BT, BK], dtype=tl.float32)
        b_dk = tl.zeros([BT, BK], dtype=tl.float32)
        for column in range(0, V, BV):
            o_v = column + tl.arange(0, BV)
            p_do, m_v = rows(do, i_b, o_t, T, i_h, H, o_v, V)
            p_u, _ = rows(u, i_b, o_t, T, i_h, H, o_v, V)
            p_dright, _ = rows(dright, i_b, o_t, T, i_h, H, o_v, V)
            p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
            p_later, _ = state(later, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
            b_do = tl.load(p_do, mask=m_v, other=0.0)
            b_u = tl.load(p_u, mask=m_v, other=0.0)
            b_dright = tl.load(p_dright, mask=m_v, other=0.0)
            b_state = tl.load(p_state, mask=m_state, other=0.0)
            b_later = tl.load(p_later, mask=m_state, other=0.0)
            if dlog is not None:
                b_passes += tl.sum(b_state * b_later, 1)
            b_state = b_state.to(b_u.dtype)
            b_dq += tl.dot(b_do, tl.trans(b_state), input_precision=PRECISION)
            b_dkept += tl.dot(b_dright, tl.trans(b_state), input_precision=PRECISION)
            b_dk += tl.dot(b_u, tl.trans(b_later.to(b_u.dtype)), input_precision=PRECISION)
        p_q, m_k = rows(q, i_b, o_t, T, i_h, H, o_k, K)
        p_k, _ = rows(k, i_b, o_t, T, i_h, H, o_k, K)
        b_q = tl.load(p_q, mask=m_k, other=0.0)
        b_k = tl.load(p_k, mask=m_k, other=0.0)
        b_dq *= b_from[:, None]
        b_dkept *= b_from[:, None]
        b_dk *= b_to[:, None]
        b_kept = tl.sum(b_dkept * b_k, 1)
        b_dbeta -= b_kept
        if dlog is not None:
            b_reads += tl.sum(b_dq * b_q, 1) - b_beta * b_kept
            b_writes += tl.sum(b_dk * b_k, 1)

        b_dscores = tl.load(matrix(dscores, i_b, i_m, i_h, M, H, BT))
        b_dsystem = tl.load(matrix(dsystem, i_b, i_m, i_h, M, H, BT))
        b_dq += tl.dot(b_dscores, b_k, input_precision=PRECISION)
        b_dk += tl.dot(tl.trans(b_dscores), b_q, input_precision=PRECISION)
        b_dk += tl.dot(b_dsystem, b_k, input_precision=PRECISION)
        b_dk += tl.dot(tl.trans(b_dsystem), b_k, input_precision=PRECISION)
        b_dk -= b_dkept * b_beta[:, None]
        p_dq, _ = rows(dq, i_b, o_t, T, i_h, H, o_k, K)
        p_dk, _ = rows(dk, i_b, o_t, T, i_h, H, o_k, K)
        tl.store(p_dq, b_dq.to(dq.dtype.element_ty), mask=m_k)
        tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=m_k)

    p_beta = (i_b * T + o_t) * H + i_h
    tl.store(dbeta + p_beta, b_dbeta.to(dbeta.dtype.element_ty), mask=m_t)
    if dlog is not None:
        across = tl.load(from_start + p_row + tl.minimum((i_m + 1) * BT, T) - 1)
        b_dlog = tl.load(dlog_pairs + p_row + o_t, mask=m_t, other=0.0)
        b_dlog += across * tl.sum(b_passes, 0)
        b_dlog += tl.cumsum(b_reads, 0, reverse=True) + tl.cumsum(b_writes, 0) - b_writes
        tl.store(dlog + p_beta, b_dlog.to(dlog.dtype.element_ty), mask=m_t)
