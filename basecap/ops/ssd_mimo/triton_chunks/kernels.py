"""The recurrence of several writes and reads in Triton, in chunks of BR // RP tokens; see README.md.

A chunk has BR rows: row i is the write or read i % RP of its token i // RP, RP being R filled up to a power of two.
Tensors: q, k [B, T, R, G, K]; v, o [B, T, R, H, V]; their biases [H, R, K]; cos, sin [B, T, H, A] of the angles; the
strengths `now` and `kept` [B, T, H], all contiguous; states between chunks [B, M, H, K, V]. Queries and keys of heads
are made of these on the chip, BK channels at a time, wherever they are needed. Rows that are not there may have any
queries and keys, but no values. The decays are those of `basecap.ops.ssd`: `coarse`, `fine`, `from_start` and `to_end`
[B, H, T], `across` [B, H, M]. `ids` are the segments [B, T], read only where PACKED.

`i_t` is a chunk's first token, counted from the first one of all rows of the batch, `o_t` are tokens of the chunk, and
`there` is how many of them there are. What is added to an address for a row is a number of 32 bits: addresses of 64
would fill the registers.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_tiles import numbered_state
from basecap.ops.kernels_shared import add_product


@triton.jit
def rows(there, R, RP: tl.constexpr, BR: tl.constexpr):
    """The tokens and ranks of a chunk's rows, and masks: the token is there; the rank is, too."""
    o = tl.arange(0, BR)
    o_t, o_r = o // RP, o % RP
    return o_t, o_r, o_t < there, (o_t < there) & (o_r < R)


@triton.jit
def channels(base, i_t, i_h, H, o_t, o_r, m_r, R, o_v, V):
    """Addresses and mask of the rows of one head of a [B, T, R, H, V] tensor."""
    p = base + (i_t * R * H + i_h) * V + (((o_t * R + o_r) * H * V)[:, None] + o_v[None, :])
    return p, m_r[:, None] & (o_v < V)[None, :]


@triton.jit
def shared_rows(base, i_t, group, G, there, R, o_k, K, RP: tl.constexpr, BR: tl.constexpr):
    """Addresses and mask [tokens, ranks, channels] of a group's queries or keys."""
    o_t, o_r = tl.arange(0, BR // RP)[:, None, None], tl.arange(0, RP)[None, :, None]
    p = base + (i_t * R * G + group) * K + ((o_t * R + o_r) * (G * K) + o_k[None, None, :])
    return p, (o_t < there) & (o_r < R) & (o_k < K)[None, None, :]


@triton.jit
def biased_pairs(
    x, bias, i_t, i_h, H, G, there, R, o_k, K,
    RP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Queries or keys of a head before their rotation: first and second channels [tokens, ranks, pairs], in float32."""
    p, m = shared_rows(x, i_t, i_h // (H // G), G, there, R, o_k, K, RP, BR)
    o_r = tl.arange(0, RP)
    p_bias = bias + i_h * R * K + ((o_r * K)[:, None] + o_k[None, :])
    b_bias = tl.load(p_bias, mask=(o_r < R)[:, None] & (o_k < K)[None, :], other=0.0)
    b_x = tl.load(p, mask=m, other=0.0).to(tl.float32) + b_bias[None, :, :]
    return tl.split(tl.reshape(b_x, [BR // RP, RP, BK // 2, 2]))


@triton.jit
def turns(base, i_t, i_h, H, there, o_a, A, RP: tl.constexpr, BR: tl.constexpr):
    """Addresses and mask [tokens, pairs] of what belongs to a head's angles; only the first A pairs have some."""
    o_t = tl.arange(0, BR // RP)
    p = base + (i_t * H + i_h) * A + ((o_t * (H * A))[:, None] + o_a[None, :])
    return p, (o_t < there)[:, None] & (o_a < A)[None, :]


@triton.jit
def rotation(cos, sin, i_t, i_h, H, there, o_a, A, RP: tl.constexpr, BR: tl.constexpr):
    """Cosine and sine [tokens, 1, pairs] by which a head's channels rotate."""
    p_cos, m = turns(cos, i_t, i_h, H, there, o_a, A, RP, BR)
    p_sin, _ = turns(sin, i_t, i_h, H, there, o_a, A, RP, BR)
    return tl.load(p_cos, mask=m, other=1.0)[:, None, :], tl.load(p_sin, mask=m, other=0.0)[:, None, :]


@triton.jit
def head_rows(
    x, bias, cos, sin, i_t, i_h, H, G, there, R, A, i_k, K,
    RP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK channels of the queries or keys of a head [BR, BK], in float32."""
    o_k, o_a = i_k * BK + tl.arange(0, BK), i_k * (BK // 2) + tl.arange(0, BK // 2)
    first, second = biased_pairs(x, bias, i_t, i_h, H, G, there, R, o_k, K, RP, BR, BK)
    b_cos, b_sin = rotation(cos, sin, i_t, i_h, H, there, o_a, A, RP, BR)
    both = tl.join(first * b_cos - second * b_sin, first * b_sin + second * b_cos)
    return tl.reshape(both, [BR, BK])


@triton.jit
def pairs(ids, i_t, o_t, m_t, BACK: tl.constexpr, PACKED: tl.constexpr):
    """Which rows a see which earlier tokens' rows b, [a, b], and which are of one token; BACK: a seen by b."""
    if BACK:
        seen, own = (o_t[:, None] < o_t[None, :]) & m_t[None, :], o_t[:, None] == o_t[None, :]
    else:
        seen, own = (o_t[:, None] > o_t[None, :]) & m_t[:, None], o_t[:, None] == o_t[None, :]
    if PACKED:
        b_ids = tl.load(ids + i_t + o_t, mask=m_t, other=0)
        seen = seen & (b_ids[:, None] == b_ids[None, :])
    return seen, own


@triton.jit
def within(coarse, fine, p_row, o_t, m_t, seen, BACK: tl.constexpr):
    """The decay [a, b] from row b to row a, with BACK from a to b; zero where not `seen`."""
    b_coarse = tl.load(coarse + p_row + o_t, mask=m_t, other=0.0)
    b_fine = tl.load(fine + p_row + o_t, mask=m_t, other=0.0)
    exponent = (b_coarse[:, None] - b_coarse[None, :]) + (b_fine[:, None] - b_fine[None, :])
    if BACK:
        exponent = -exponent
    return tl.where(seen, tl.exp(tl.where(seen, exponent, 0.0)), 0.0)


@triton.jit
def strength(x, i_t, i_h, H, o_t, m_t):
    """A strength of each row's token."""
    return tl.load(x + i_t * H + i_h + o_t * H, mask=m_t, other=0.0)


@triton.jit
def states_fwd_kernel(
    x, bias, v, cos, sin, weight, kept, across, first, states, last,
    T, R, G, H, K, V, A, M,
    BACK: tl.constexpr, PRECISION: tl.constexpr, RP: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Walk along the chunks with a block of the state: keep it before each, then let it decay and add a chunk.

    That adds k (weight kept v)^T. With BACK from the end, for the gradients of the states after each chunk: x is q and
    not k, v is do, and it adds q (weight do)^T.
    """
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.cdiv(V, BV)
    i_k = tl.program_id(0) // blocks
    o_k, o_v = i_k * BK + tl.arange(0, BK), tl.program_id(0) % blocks * BV + tl.arange(0, BV)
    p_first, m_s = numbered_state(first, i_b * H + i_h, K, V, o_k, o_v)
    b_s = tl.load(p_first, mask=m_s, other=0.0)
    for i in tl.range(0, M, num_stages=1, disable_licm=True):
        i_m = i
        if BACK:
            i_m = M - 1 - i
        p_s, _ = numbered_state(states, (i_b * M + i_m) * H + i_h, K, V, o_k, o_v)
        tl.store(p_s, b_s.to(states.dtype.element_ty), mask=m_s)
        start = i_m * (BR // RP)
        i_t, p_row, there = i_b * T + start, (i_b * H + i_h) * T + start, T - start
        o_t, o_r, m_t, m_r = rows(there, R, RP, BR)
        b_weight = tl.load(weight + p_row + o_t, mask=m_t, other=0.0)
        if not BACK:
            b_weight *= strength(kept, i_t, i_h, H, o_t, m_t)
        p_v, m_v = channels(v, i_t, i_h, H, o_t, o_r, m_r, R, o_v, V)
        b_v = tl.load(p_v, mask=m_v, other=0.0)
        b_x = head_rows(x, bias, cos, sin, i_t, i_h, H, G, there, R, A, i_k, K, RP, BR, BK).to(b_v.dtype)
        b_added = (b_v * b_weight[:, None]).to(b_v.dtype)
        b_across = tl.load(across + (i_b * H + i_h) * M + i_m)
        b_s = add_product(b_s * b_across, tl.trans(b_x), b_added, PRECISION)
    p_last, _ = numbered_state(last, i_b * H + i_h, K, V, o_k, o_v)
    tl.store(p_last, b_s, mask=m_s)


@triton.jit
def output_fwd_kernel(
    q, k, q_bias, k_bias, v, cos, sin, coarse, fine, from_start, now, kept, ids, states, o,
    T, R, G, H, K, V, A, M,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, RP: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk for one head."""
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = i_m * (BR // RP)
    i_t, p_row, there = i_b * T + start, (i_b * H + i_h) * T + start, (T - start).to(tl.int32)
    o_v = tl.arange(0, BV)
    o_t, o_r, m_t, m_r = rows(there, R, RP, BR)
    b_scores, b_o = tl.zeros([BR, BR], tl.float32), tl.zeros([BR, BV], tl.float32)
    for i_k in tl.range(0, tl.cdiv(K, BK), num_stages=1, disable_licm=True):
        b_q = head_rows(q, q_bias, cos, sin, i_t, i_h, H, G, there, R, A, i_k, K, RP, BR, BK).to(v.dtype.element_ty)
        b_k = head_rows(k, k_bias, cos, sin, i_t, i_h, H, G, there, R, A, i_k, K, RP, BR, BK).to(v.dtype.element_ty)
        b_scores = add_product(b_scores, b_q, tl.trans(b_k), PRECISION)
        o_k = i_k * BK + tl.arange(0, BK)
        p_s, m_s = numbered_state(states, (i_b * M + i_m) * H + i_h, K, V, o_k, o_v)
        b_o = add_product(b_o, b_q, tl.load(p_s, mask=m_s, other=0.0), PRECISION)
    seen, own = pairs(ids, i_t, o_t, m_t, False, PACKED)
    b_weights = within(coarse, fine, p_row, o_t, m_t, seen, False) * strength(kept, i_t, i_h, H, o_t, m_t)[None, :]
    b_weights = tl.where(own, strength(now, i_t, i_h, H, o_t, m_t)[:, None], b_weights) * b_scores
    p_v, m_v = channels(v, i_t, i_h, H, o_t, o_r, m_r, R, o_v, V)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    b_o *= tl.load(from_start + p_row + o_t, mask=m_t, other=0.0)[:, None]
    b_o = add_product(b_o, b_weights.to(b_v.dtype), b_v, PRECISION)
    p_o, m_o = channels(o, i_t, i_h, H, o_t, o_r, m_r, R, o_v, V)
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_o)
