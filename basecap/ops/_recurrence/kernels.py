"""The recurrences of RWKV-5, 6 and 7 in Triton, one token at a time with the state in registers.

One program holds the state [K, BV] of one head and BV of its value channels, which are independent of each other. That
is the definition itself, in float32: exact for any decay, and at batch x heads of a hundred or more the GPU is full.
Backward keeps a state every CHUNK tokens, runs each chunk forward again into scratch memory, and then processes it in
reverse.
"""

import triton
import triton.language as tl


@triton.jit
def recur_fwd_kernel(
    r, log_decay, k, v, a, b, state, starts, o, final, kept,
    T, H, K, V,
    DELTA: tl.constexpr, STARTS: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs [B, T, H, V], the final state and the states [B * H, T / CHUNK, K, V] that enter each chunk.

    With DELTA the state also gains b_t (a_t^T S_{t-1}) and is read after the token, else before it.
    """
    i_n = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_n // H, i_n % H
    o_k, o_v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    o_kv = o_k[:, None] * V + o_v[None, :]
    b_s = tl.load(state + i_n * K * V + o_kv, mask=m_kv, other=0.0)
    chunks = tl.cdiv(T, CHUNK)
    for i_c in range(chunks):
        tl.store(kept + (i_n * chunks + i_c) * K * V + o_kv, b_s, mask=m_kv)
        for t in tl.range(i_c * CHUNK, tl.minimum(T, (i_c + 1) * CHUNK), num_stages=STAGES):
            i_t = (i_b * T + t) * H + i_h
            p_k = i_t * K + o_k
            b_r = tl.load(r + p_k, mask=m_k, other=0.0).to(tl.float32)
            b_w = tl.exp(tl.load(log_decay + p_k, mask=m_k, other=0.0).to(tl.float32))
            b_k = tl.load(k + p_k, mask=m_k, other=0.0).to(tl.float32)
            b_v = tl.load(v + i_t * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            if STARTS:
                b_s = tl.where(tl.load(starts + i_b * T + t) != 0, 0.0, b_s)
            b_new = b_w[:, None] * b_s + b_k[:, None] * b_v[None, :]
            if DELTA:
                b_a = tl.load(a + p_k, mask=m_k, other=0.0).to(tl.float32)
                b_b = tl.load(b + p_k, mask=m_k, other=0.0).to(tl.float32)
                b_new += b_b[:, None] * tl.sum(b_a[:, None] * b_s, 0)[None, :]
                b_o = tl.sum(b_r[:, None] * b_new, 0)
            else:
                b_o = tl.sum(b_r[:, None] * b_s, 0)
            b_s = b_new
            tl.store(o + i_t * V + o_v, b_o, mask=m_v)
    tl.store(final + i_n * K * V + o_kv, b_s, mask=m_kv)


@triton.jit
def recur_bwd_kernel(
    r, log_decay, k, v, a, b, starts, kept, do, dlater, scratch, dr, dlog_decay, dk, dv, da, db, dstate,
    begin, end, T, SPAN, H, K, V, PART,
    DELTA: tl.constexpr, STARTS: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens from `begin`, where a chunk begins, to `end`, and of the state before them.

    Those of r, log_decay, k, a and b are sums over V: each program writes its part [B, SPAN, H, K], `PART` apart.
    """
    i_v, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_n // H, i_n % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    o_kv = o_k[:, None] * V + o_v[None, :]
    p_scratch = scratch + (i_n * tl.num_programs(0) + i_v) * CHUNK * BK * BV
    p_scratch += o_k[:, None] * BV + tl.arange(0, BV)[None, :]
    b_ds = tl.load(dlater + i_n * K * V + o_kv, mask=m_kv, other=0.0)
    chunks, last = tl.cdiv(T, CHUNK), tl.cdiv(end, CHUNK) - 1
    for i in range(last + 1 - begin // CHUNK):
        i_c = last - i
        first = i_c * CHUNK
        length = tl.minimum(end - first, CHUNK)
        b_s = tl.load(kept + (i_n * chunks + i_c) * K * V + o_kv, mask=m_kv, other=0.0)
        for j in tl.range(0, length, num_stages=STAGES):
            i_t = (i_b * T + first + j) * H + i_h
            p_k = i_t * K + o_k
            b_w = tl.exp(tl.load(log_decay + p_k, mask=m_k, other=0.0).to(tl.float32))
            b_k = tl.load(k + p_k, mask=m_k, other=0.0).to(tl.float32)
            b_v = tl.load(v + i_t * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_do = tl.load(do + i_t * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            if STARTS:
                b_s = tl.where(tl.load(starts + i_b * T + first + j) != 0, 0.0, b_s)
            tl.store(p_scratch + j * BK * BV, b_s)
            b_new = b_w[:, None] * b_s + b_k[:, None] * b_v[None, :]
            if DELTA:
                b_a = tl.load(a + p_k, mask=m_k, other=0.0).to(tl.float32)
                b_b = tl.load(b + p_k, mask=m_k, other=0.0).to(tl.float32)
                b_new += b_b[:, None] * tl.sum(b_a[:, None] * b_s, 0)[None, :]
                b_dr = tl.sum(b_new * b_do[None, :], 1)
            else:
                b_dr = tl.sum(b_s * b_do[None, :], 1)
            b_s = b_new
            p_part = i_v * PART + ((i_b * SPAN + first - begin + j) * H + i_h) * K + o_k
            tl.store(dr + p_part, b_dr, mask=m_k)
        tl.debug_barrier()
        for i_back in tl.range(0, length, num_stages=STAGES):
            j = length - 1 - i_back
            i_t = (i_b * T + first + j) * H + i_h
            p_k = i_t * K + o_k
            b_s = tl.load(p_scratch + j * BK * BV)
            b_r = tl.load(r + p_k, mask=m_k, other=0.0).to(tl.float32)
            b_w = tl.exp(tl.load(log_decay + p_k, mask=m_k, other=0.0).to(tl.float32))
            b_k = tl.load(k + p_k, mask=m_k, other=0.0).to(tl.float32)
            b_v = tl.load(v + i_t * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_do = tl.load(do + i_t * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_read = b_r[:, None] * b_do[None, :]
            if DELTA:
                b_ds += b_read
            p_part = i_v * PART + ((i_b * SPAN + first - begin + j) * H + i_h) * K + o_k
            tl.store(dk + p_part, tl.sum(b_ds * b_v[None, :], 1), mask=m_k)
            tl.store(dlog_decay + p_part, tl.sum(b_ds * b_s, 1) * b_w, mask=m_k)
            b_dv = tl.sum(b_ds * b_k[:, None], 0)
            tl.store(dv + i_t * V + o_v, b_dv.to(dv.dtype.element_ty), mask=m_v)
            b_past = b_w[:, None] * b_ds
            if DELTA:
                b_a = tl.load(a + p_k, mask=m_k, other=0.0).to(tl.float32)
                b_b = tl.load(b + p_k, mask=m_k, other=0.0).to(tl.float32)
                b_recalled = tl.sum(b_a[:, None] * b_s, 0)
                b_drecalled = tl.sum(b_ds * b_b[:, None], 0)
                tl.store(db + p_part, tl.sum(b_ds * b_recalled[None, :], 1), mask=m_k)
                tl.store(da + p_part, tl.sum(b_s * b_drecalled[None, :], 1), mask=m_k)
                b_past += b_a[:, None] * b_drecalled[None, :]
            else:
                b_past += b_read
            b_ds = b_past
            if STARTS:
                b_ds = tl.where(tl.load(starts + i_b * T + first + j) != 0, 0.0, b_ds)
        tl.debug_barrier()
    tl.store(dstate + i_n * K * V + o_kv, b_ds, mask=m_kv)
