"""Blocks of linear attention with a decay per channel, in Triton: the doubling of `blocks` inside one program.

Rows are (token, read), columns (token, write). At each level a token's read is decayed from the start of its block of
`size` tokens and its write to the block's end; the sums of logarithms are products with matrices of zeros and ones,
so nothing is subtracted and no exponent is positive. Then every odd block reads what the even block before it wrote.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(a, b):
    # Three products of 10-bit mantissas are as good as one in float32.
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _decays(b_w, o_row, o_col, o_c, size):
    """Masks [rows, C] and [columns, C] of the tokens whose decays count, and the decays of reads and writes."""
    m_read = ((o_row // size)[:, None] == (o_c // size)[None, :]) & (o_c[None, :] < o_row[:, None])
    m_write = ((o_col // size)[:, None] == (o_c // size)[None, :]) & (o_c[None, :] > o_col[:, None])
    b_read, b_write = m_read.to(tl.float32), m_write.to(tl.float32)
    return b_read, b_write, tl.exp(_dot(b_read, b_w)), tl.exp(_dot(b_write, b_w))


@triton.jit
def assemble_fwd_kernel(
    reads, writes, log_decay, scores, out_reads, out_writes, out_decay,
    K, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One block of C tokens per program; the tensors are contiguous."""
    i_n = tl.program_id(0).to(tl.int64)
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    o_q, o_w = tl.arange(0, C * R), tl.arange(0, C * W)
    o_row, o_col = o_q // R, o_w // W
    m_k = (o_k < K)[None, :]
    p_q = (i_n * C * R + o_q)[:, None] * K + o_k[None, :]
    p_w = (i_n * C * W + o_w)[:, None] * K + o_k[None, :]
    b_q = tl.load(reads + p_q, mask=m_k, other=0.0)
    b_k = tl.load(writes + p_w, mask=m_k, other=0.0)
    b_d = tl.load(log_decay + (i_n * C + o_c)[:, None] * K + o_k[None, :], mask=m_k, other=0.0)
    b_a = tl.zeros([C * R, C * W], tl.float32)
    for level in tl.static_range(LEVELS):
        size = 1 << level
        _, _, b_in, b_out = _decays(b_d, o_row, o_col, o_c, size)
        i_row, i_col = (o_row // size)[:, None], (o_col // size)[None, :]
        m_a = (i_row % 2 == 1) & (i_col == i_row - 1)
        b_a += tl.where(m_a, _dot(b_q * b_in, tl.trans(b_k * b_out)), 0.0)
    _, _, b_in, b_out = _decays(b_d, o_row, o_col, o_c, C)
    p_a = (i_n * C * R + o_q)[:, None] * (C * W) + o_w[None, :]
    tl.store(scores + p_a, b_a)
    tl.store(out_reads + p_q, b_q * b_in, mask=m_k)
    tl.store(out_writes + p_w, b_k * b_out, mask=m_k)
    tl.store(out_decay + i_n * K + o_k, tl.exp(tl.sum(b_d, 0)), mask=o_k < K)


@triton.jit
def assemble_bwd_kernel(
    grad_scores, grad_reads, grad_writes, grad_decay, reads, writes, log_decay, dreads, dwrites, dlog_decay,
    K, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Gradients of one block per program, level by level."""
    i_n = tl.program_id(0).to(tl.int64)
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    o_q, o_w = tl.arange(0, C * R), tl.arange(0, C * W)
    o_row, o_col = o_q // R, o_w // W
    m_k = (o_k < K)[None, :]
    p_q = (i_n * C * R + o_q)[:, None] * K + o_k[None, :]
    p_w = (i_n * C * W + o_w)[:, None] * K + o_k[None, :]
    p_d = (i_n * C + o_c)[:, None] * K + o_k[None, :]
    b_q = tl.load(reads + p_q, mask=m_k, other=0.0)
    b_k = tl.load(writes + p_w, mask=m_k, other=0.0)
    b_d = tl.load(log_decay + p_d, mask=m_k, other=0.0)
    # What leaves the block: its reads, its writes and its decay.
    b_read, b_write, b_in, b_out = _decays(b_d, o_row, o_col, o_c, C)
    b_dq = tl.load(grad_reads + p_q, mask=m_k, other=0.0) * b_in
    b_dk = tl.load(grad_writes + p_w, mask=m_k, other=0.0) * b_out
    b_dd = _dot(tl.trans(b_read), b_q * b_dq) + _dot(tl.trans(b_write), b_k * b_dk)
    b_total = tl.load(grad_decay + i_n * K + o_k, mask=o_k < K, other=0.0) * tl.exp(tl.sum(b_d, 0))
    b_dd += b_total[None, :]
    b_da = tl.load(grad_scores + (i_n * C * R + o_q)[:, None] * (C * W) + o_w[None, :])
    for level in tl.static_range(LEVELS):
        size = 1 << level
        b_read, b_write, b_in, b_out = _decays(b_d, o_row, o_col, o_c, size)
        i_row, i_col = (o_row // size)[:, None], (o_col // size)[None, :]
        b_ds = tl.where((i_row % 2 == 1) & (i_col == i_row - 1), b_da, 0.0)
        b_dq_in = _dot(b_ds, b_k * b_out) * b_in
        b_dk_out = _dot(tl.trans(b_ds), b_q * b_in) * b_out
        b_dq += b_dq_in
        b_dk += b_dk_out
        b_dd += _dot(tl.trans(b_read), b_q * b_dq_in) + _dot(tl.trans(b_write), b_k * b_dk_out)
    tl.store(dreads + p_q, b_dq, mask=m_k)
    tl.store(dwrites + p_w, b_dk, mask=m_k)
    tl.store(dlog_decay + p_d, b_dd, mask=m_k)


@triton.jit
def carry_fwd_kernel(
    step, added, state, states,
    M, K, V, MATRIX: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """States before each of M blocks and after the last, for one head and BV of its values per program."""
    i_n = tl.program_id(0).to(tl.int64)
    o_k, o_v = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_kv = o_k[:, None] * V + o_v[None, :]
    b_s = tl.load(state + i_n * K * V + o_kv, mask=m, other=0.0)
    tl.store(states + i_n * (M + 1) * K * V + o_kv, b_s, mask=m)
    for i_m in range(M):
        i_nm = i_n * M + i_m
        b_x = tl.load(added + i_nm * K * V + o_kv, mask=m, other=0.0)
        if MATRIX:
            m_kk = (o_k < K)[:, None] & (o_k < K)[None, :]
            b_step = tl.load(step + i_nm * K * K + o_k[:, None] * K + o_k[None, :], mask=m_kk, other=0.0)
            b_s = _dot(b_step, b_s) + b_x
        else:
            b_s = tl.load(step + i_nm * K + o_k, mask=o_k < K, other=0.0)[:, None] * b_s + b_x
        tl.store(states + (i_n * (M + 1) + i_m + 1) * K * V + o_kv, b_s, mask=m)
