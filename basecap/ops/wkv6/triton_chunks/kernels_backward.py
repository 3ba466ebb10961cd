"""The recurrence of RWKV-5 and 6 in chunks in Triton, backward: a chunk by itself; see README.md.

Layouts as in kernels.py. No product has a transposed product as its operand: Triton 3.4 to 3.7.0 compiles those
to wrong results on Hopper.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_joins import in_right, join, joined, spread
from basecap.ops._recurrence.kernels_tiles import numbered_state
from basecap.ops.wkv6.triton_chunks.kernels import decays, matrix, rows


@triton.jit
def between(o_t, level: tl.constexpr):
    """[t, x]: whether the decay at t is part of what x reads or writes across its block's border with its neighbour.

    In a right block x reads over the tokens before it, in a left one x writes over those behind it.
    """
    beyond = tl.where(in_right(o_t, level)[None, :], o_t[:, None] < o_t[None, :], o_t[:, None] > o_t[None, :])
    return tl.where(((o_t >> level)[:, None] == (o_t >> level)[None, :]) & beyond, 1.0, 0.0)


@triton.jit
def chunk_bwd_kernel(
    do, r, k, v, log_decay, bonus, starts, states, later, scores, dr, dk, dv, dlog, dbonus,
    stride_b, stride_t, stride_h, T, H, K, V, M,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, SHARE: tl.constexpr,
    LEVELS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's inputs from the state before it and the gradient of the state after it (`later`).

    Those of the log decays are sums of the shares of all products that a decay is part of, never differences.
    `dr`, `dk` and `dlog` [PARTS, B, T, G, K] hold the part of each of the heads that share keys, `dbonus` [B, M, H, K]
    each chunk's part.
    """
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_g, G = i_h // PARTS, H // PARTS
    i_row, i_keys, i_chunk = i_b * T * H + i_h, i_b * T * G + i_g, (i_b * M + i_m) * H + i_h
    o_c, o_v = tl.arange(0, BT), tl.arange(0, BV)
    log_decay += i_b * stride_b + i_g * stride_h
    if starts is not None:
        starts += i_b * T
    p_do, m_v = rows(do + i_row * V, i_m, T, H * V, o_v, V, BT)
    p_v, m_v = rows(v + i_row * V, i_m, T, H * V, o_v, V, BT)
    b_do = tl.load(p_do, mask=m_v, other=0.0)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    b_down = tl.sum(b_do.to(tl.float32) * b_v.to(tl.float32), 1)
    # Of each pair of tokens the later one reads, whichever of them is the row.
    b_dscores = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_dscores_back = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
    b_dscores = tl.where(o_c[:, None] > o_c[None, :], b_dscores, b_dscores_back).to(b_v.dtype)
    b_dv = tl.dot(tl.trans(tl.load(matrix(scores, (i_b * M + i_m) * G + i_g, BT))), b_do, input_precision=PRECISION)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        p_r, m_k = rows(r + i_keys * K, i_m, T, G * K, o_k, K, BT)
        p_k, m_k = rows(k + i_keys * K, i_m, T, G * K, o_k, K, BT)
        b_r = tl.load(p_r, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
        b_bonus = tl.load(bonus + i_g * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        tl.store(dbonus + i_chunk * K + o_k, tl.sum(b_r * b_k * b_down[:, None], 0), mask=o_k < K)
        b_dr = b_down[:, None] * b_bonus[None, :] * b_k
        b_dk = b_down[:, None] * b_bonus[None, :] * b_r
        b_dlog = tl.zeros([BT, BK], dtype=tl.float32)
        b_from, b_to, b_all = decays(log_decay, stride_t, starts, i_m, T, o_k, K, BT)
        for level in tl.static_range(LEVELS):
            right = in_right(o_c, level)[:, None]
            b_decay = tl.exp2(tl.where(right, b_from, b_to))
            b_both = tl.where(right, b_r, b_k) * b_decay
            b_pairs = tl.where(joined(o_c, level), b_dscores, 0.0).to(b_v.dtype)
            b_dboth = tl.dot(b_pairs, b_both.to(b_v.dtype), input_precision=PRECISION)
            b_dr += tl.where(right, b_dboth * b_decay, 0.0)
            b_dk += tl.where(right, 0.0, b_dboth * b_decay)
            if level == 1:
                # Pairs of tokens: what the outer one reads or writes passes the inner one.
                outer = (in_right(o_c, 0) == in_right(o_c, 1))[:, None]
                b_share = spread(tl.where(outer, b_both * b_dboth, 0.0), 0)
                b_dlog += tl.where(outer, 0.0, b_share)
            if level > 1:
                b_share = (b_both * b_dboth).to(SHARE)
                b_dlog = tl.dot(between(o_c, level).to(SHARE), b_share, b_dlog, input_precision=PRECISION)
            b_from, b_to, b_all = join(b_from, b_to, b_all, level)

        b_from, b_to = tl.exp2(b_from), tl.exp2(b_to)
        p_state, m_state = numbered_state(states, i_chunk, K, V, o_k, o_v)
        p_later, m_state = numbered_state(later, i_chunk, K, V, o_k, o_v)
        b_state = tl.load(p_state, mask=m_state, other=0.0)
        b_later = tl.load(p_later, mask=m_state, other=0.0)
        b_dreads = tl.dot(b_do, tl.trans(b_state), input_precision=PRECISION) * b_from
        b_dwrites = tl.dot(b_v, tl.trans(b_later), input_precision=PRECISION) * b_to
        b_dr += b_dreads
        b_dk += b_dwrites
        b_dv = tl.dot((b_k * b_to).to(b_v.dtype), b_later, b_dv, input_precision=PRECISION)
        behind = tl.where(o_c[:, None] < o_c[None, :], 1.0, 0.0).to(SHARE)
        b_dlog = tl.dot(behind, (b_r * b_dreads).to(SHARE), b_dlog, input_precision=PRECISION)
        b_dlog = tl.dot(tl.trans(behind), (b_k * b_dwrites).to(SHARE), b_dlog, input_precision=PRECISION)
        b_dlog += tl.exp2(b_all) * tl.sum(b_state.to(tl.float32) * b_later.to(tl.float32), 1)[None, :]
        for_k = ((i_h % PARTS).to(tl.int64) * tl.num_programs(2) * T * G + i_keys) * K
        p_dr, m_k = rows(dr + for_k, i_m, T, G * K, o_k, K, BT)
        p_dk, m_k = rows(dk + for_k, i_m, T, G * K, o_k, K, BT)
        p_dlog, m_k = rows(dlog + for_k, i_m, T, G * K, o_k, K, BT)
        tl.store(p_dr, b_dr.to(dr.dtype.element_ty), mask=m_k)
        tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=m_k)
        tl.store(p_dlog, b_dlog.to(dlog.dtype.element_ty), mask=m_k)
    p_dv, m_v = rows(dv + i_row * V, i_m, T, H * V, o_v, V, BT)
    tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=m_v)
