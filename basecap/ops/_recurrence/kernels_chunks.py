"""Shared by the kernels by chunks of generalised delta rules: rows, the triangular systems, the walk and the outputs.

What is known of single tokens is [B, T, H, K], v and o [B, T, H, V]; matrices between the BT tokens of a chunk
[B, M, H, BT, BT]; states between chunks [B, M, H, K, V]; the decays across chunks [B, M, H, K] float32; all contiguous.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_tiles import matrix, rows, state
from basecap.ops.kernels_shared import add_product


@triton.jit
def values(base, i_b, o_t, T, i_h, H, o_x, X):
    """Rows of one head in float32."""
    p_x, m_x = rows(base, i_b, o_t, T, i_h, H, o_x, X)
    return tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def store_rows(base, i_b, o_t, T, i_h, H, o_x, X, b_x):
    """Store rows of one head."""
    p_x, m_x = rows(base, i_b, o_t, T, i_h, H, o_x, X)
    tl.store(p_x, b_x.to(base.dtype.element_ty), mask=m_x)


@triton.jit
def invert(b_scores, o_c, WIDE: tl.constexpr, PRECISION: tl.constexpr, LEVELS: tl.constexpr):
    """The inverse of 1 - scores, which are zero on and above the diagonal.

    By the blocks on the diagonal, of one token, of two, of four, ...: two neighbours with the scores C left of the
    second invert to their own inverses and second^-1 C first^-1 there. Unlike with powers nothing grows and cancels.
    """
    b_inverse = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        o_block = o_c // (1 << level)
        beside = (o_block[:, None] == o_block[None, :] + 1) & (o_block[:, None] % 2 == 1)
        b_beside = tl.where(beside, b_scores, 0.0)
        if level > 0:
            b_blocks = b_inverse.to(WIDE)
            b_beside = tl.dot(b_blocks, b_beside.to(WIDE), input_precision=PRECISION)
            b_beside = tl.dot(b_beside.to(WIDE), b_blocks, input_precision=PRECISION)
        b_inverse += b_beside
    return b_inverse


@triton.jit
def walk_fwd_kernel(
    left, right, write, v, across, first, states, last,
    T, H, K, V, M,
    BACK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Walk with BV columns of the state: keep it before each chunk, then S = across S + right^T (left S) + write^T v.

    With BACK from the end, for the gradients of the states after each chunk. `first` may be None for zeros, `last`
    where it is not wanted. Each tile goes into one product alone, so that the loads can be pipelined.
    """
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k = tl.arange(0, BK)
    b_state = tl.zeros([BK, BV], dtype=tl.float32)
    if first is not None:
        p_first, m_state = state(first, i_b, 0, i_h, 1, H, o_k, K, o_v, V)
        b_state += tl.load(p_first, mask=m_state, other=0.0).to(tl.float32)
    for i in tl.range(0, M, num_stages=STAGES):
        i_m = i
        if BACK:
            i_m = M - 1 - i
        o_t = i_m * BT + tl.arange(0, BT)
        p_left, m_k = rows(left, i_b, o_t, T, i_h, H, o_k, K)
        p_right, _ = rows(right, i_b, o_t, T, i_h, H, o_k, K)
        p_write, _ = rows(write, i_b, o_t, T, i_h, H, o_k, K)
        p_v, m_v = rows(v, i_b, o_t, T, i_h, H, o_v, V)
        b_left = tl.load(p_left, mask=m_k, other=0.0)
        b_right = tl.load(p_right, mask=m_k, other=0.0)
        b_write = tl.load(p_write, mask=m_k, other=0.0)
        b_v = tl.load(p_v, mask=m_v, other=0.0)
        b_across = tl.load(across + ((i_b * M + i_m) * H + i_h) * K + o_k, mask=o_k < K, other=0.0)
        b_low = b_state.to(b_left.dtype)
        p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
        tl.store(p_state, b_low, mask=m_state)
        b_seen = tl.dot(b_left, b_low, input_precision=PRECISION).to(b_left.dtype)
        b_state = add_product(b_state * b_across[:, None], tl.trans(b_write), b_v, PRECISION)
        b_state = add_product(b_state, tl.trans(b_right), b_seen, PRECISION)
    if last is not None:
        p_last, m_state = state(last, i_b, 0, i_h, 1, H, o_k, K, o_v, V)
        tl.store(p_last, b_state, mask=m_state)


@triton.jit
def output_fwd_kernel(
    read, read_pairs, v, states, o,
    T, H, K, V, M,
    PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV columns of a chunk's outputs: what is read from the state before it and from its own values."""
    i_h, i_m, i_b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t, o_k = i_m * BT + tl.arange(0, BT), tl.arange(0, BK)
    o_v = tl.program_id(0) // H * BV + tl.arange(0, BV)
    p_read, m_read = rows(read, i_b, o_t, T, i_h, H, o_k, K)
    p_v, m_v = rows(v, i_b, o_t, T, i_h, H, o_v, V)
    p_state, m_state = state(states, i_b, i_m, i_h, M, H, o_k, K, o_v, V)
    b_pairs = tl.load(matrix(read_pairs, i_b, i_m, i_h, M, H, BT))
    b_o = tl.dot(b_pairs, tl.load(p_v, mask=m_v, other=0.0), input_precision=PRECISION)
    b_read, b_state = tl.load(p_read, mask=m_read, other=0.0), tl.load(p_state, mask=m_state, other=0.0)
    store_rows(o, i_b, o_t, T, i_h, H, o_v, V, add_product(b_o, b_read, b_state, PRECISION))
