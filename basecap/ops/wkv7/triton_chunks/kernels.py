"""The RWKV-7 recurrence by chunks in Triton: what a chunk needs before the walk over the chunks; see README.md.

Tensors: r, k, a, b, log_decay and all that is known of single tokens [B, T, H, K], v and o [B, T, H, V]; matrices
between the BT tokens of a chunk [B, M, H, BT, BT]; states between chunks [B, M, H, K, V]; the decays across chunks
[B, M, H, K] float32; all contiguous. `ids` are the segments [B, T] or None.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_chunks import invert, store_rows, values
from basecap.ops._recurrence.kernels_tiles import matrix, rows


@triton.jit
def gates(log_decay, i_b, o_t, T, i_h, H, o_k, K, SUM: tl.constexpr, BT: tl.constexpr):
    """Decays of a chunk's tokens from its middle, after and before the token's own, and to it; from start and to end.

    Those from the middle are above 1 for earlier tokens, those to it for later ones: half a chunk of decays at most.
    """
    p_log, m_log = rows(log_decay, i_b, o_t, T, i_h, H, o_k, K)
    b_log = tl.load(p_log, mask=m_log, other=0.0).to(SUM)
    o_c = tl.arange(0, BT)[:, None]
    b_sum = tl.cumsum(b_log, 0)
    b_middle = tl.sum(tl.where(o_c == BT // 2 - 1, b_sum, 0.0), 0)
    b_end = tl.sum(tl.where(o_c == BT - 1, b_sum, 0.0), 0)
    b_end -= b_middle
    b_before = (b_sum - b_middle[None, :] - b_log).to(tl.float32)
    b_sum = (b_sum - b_middle[None, :]).to(tl.float32)
    return (
        tl.exp(b_sum),
        tl.exp(b_before),
        tl.exp(-b_sum),
        tl.exp(b_middle.to(tl.float32)),
        tl.exp(b_end.to(tl.float32)),
    )


@triton.jit
def before(ids, i_b, o_t, T, AFTER: tl.constexpr):
    """Whether token s comes before token t of the same segment, [t, s]; with AFTER, after it."""
    seen = o_t[:, None] > o_t[None, :]
    if AFTER:
        seen = o_t[:, None] < o_t[None, :]
    if ids is not None:
        b_ids = tl.load(ids + i_b * T + o_t, mask=o_t < T, other=0)
        seen = seen & (b_ids[:, None] == b_ids[None, :])
    return seen


@triton.jit
def edges(ids, i_b, i_m, o_t, T, BT: tl.constexpr):
    """Which tokens the state before the chunk reaches, which reach the one after it, and whether that does itself."""
    entered, left, passed = o_t < T, o_t < T, True
    if ids is not None:
        b_ids = tl.load(ids + i_b * T + o_t, mask=o_t < T, other=0)
        first = tl.load(ids + i_b * T + tl.maximum(i_m * BT - 1, 0))
        last = tl.load(ids + i_b * T + tl.minimum((i_m + 1) * BT, T) - 1)
        entered, left, passed = entered & (b_ids == first), left & (b_ids == last), first == last
    return entered, left, passed


@triton.jit
def store_transposed(base, i_b, o_t, T, i_h, H, o_x, X, b_x):
    """Store columns [BX, BT] as rows of one head."""
    p_x = base + ((i_b * T + o_t)[None, :] * H + i_h) * X + o_x[:, None]
    tl.store(p_x, b_x.to(base.dtype.element_ty), mask=(o_t < T)[None, :] & (o_x < X)[:, None])


@triton.jit
def chunk_fwd_kernel(
    r, log_decay, k, a, b, ids, inverse, recall, read, write, answer, across, read_pairs,
    adjoint, recall_pairs, adjoint_pairs,
    T, H, K, M,
    BACK: tl.constexpr, SUM: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Everything about a chunk but its state and values, and the inverse of its triangular system.

    With BACK the inverse is already there, and `adjoint` and what follows, else None, are written too.
    """
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_c = tl.arange(0, BT)
    o_t = i_m * BT + o_c
    low = recall.dtype.element_ty
    b_ak = tl.zeros([BT, BT], dtype=tl.float32)
    b_ab = tl.zeros([BT, BT], dtype=tl.float32)
    b_rk = tl.zeros([BT, BT], dtype=tl.float32)
    b_rb = tl.zeros([BT, BT], dtype=tl.float32)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_after, b_before, b_to, _, _ = gates(log_decay, i_b, o_t, T, i_h, H, o_k, K, SUM, BT)
        b_r = (values(r, i_b, o_t, T, i_h, H, o_k, K) * b_after).to(WIDE)
        b_a = (values(a, i_b, o_t, T, i_h, H, o_k, K) * b_before).to(WIDE)
        b_k = tl.trans((values(k, i_b, o_t, T, i_h, H, o_k, K) * b_to).to(WIDE))
        b_b = tl.trans((values(b, i_b, o_t, T, i_h, H, o_k, K) * b_to).to(WIDE))
        if not BACK:
            b_ab += tl.dot(b_a, b_b, input_precision=PRECISION)
        b_ak += tl.dot(b_a, b_k, input_precision=PRECISION)
        b_rk += tl.dot(b_r, b_k, input_precision=PRECISION)
        b_rb += tl.dot(b_r, b_b, input_precision=PRECISION)
    earlier = before(ids, i_b, o_t, T, False)
    seen = earlier | (o_c[:, None] == o_c[None, :])
    b_ak = tl.where(earlier, b_ak, 0.0).to(low)
    b_rk = tl.where(seen, b_rk, 0.0).to(low)
    b_rb = tl.where(seen, b_rb, 0.0).to(low)
    p_inverse = matrix(inverse, i_b, i_m, i_h, M, H, BT)
    if BACK:
        b_inverse = tl.load(p_inverse)
    else:
        b_inverse = invert(tl.where(earlier, b_ab, 0.0), o_c, WIDE, PRECISION, LEVELS).to(low)
        tl.store(p_inverse, b_inverse)

    b_recall_pairs = tl.dot(b_inverse, b_ak, input_precision=PRECISION).to(low)
    b_adjoint_pairs = tl.dot(b_rb, b_inverse, input_precision=PRECISION).to(low)
    b_pairs = b_rk + tl.dot(b_adjoint_pairs, b_ak, input_precision=PRECISION)
    tl.store(matrix(read_pairs, i_b, i_m, i_h, M, H, BT), b_pairs.to(low))
    if BACK:
        tl.store(matrix(recall_pairs, i_b, i_m, i_h, M, H, BT), b_recall_pairs)
        tl.store(matrix(adjoint_pairs, i_b, i_m, i_h, M, H, BT), b_adjoint_pairs)
    entered, left, passed = edges(ids, i_b, i_m, o_t, T, BT)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_after, b_before, b_to, b_start, b_end = gates(log_decay, i_b, o_t, T, i_h, H, o_k, K, SUM, BT)
        b_read = values(r, i_b, o_t, T, i_h, H, o_k, K) * tl.where(entered[:, None], b_after * b_start[None, :], 0.0)
        b_a = values(a, i_b, o_t, T, i_h, H, o_k, K) * tl.where(entered[:, None], b_before * b_start[None, :], 0.0)
        b_to = tl.where(left[:, None], b_to * b_end[None, :], 0.0)
        b_b = (values(b, i_b, o_t, T, i_h, H, o_k, K) * b_to).to(low)
        b_write = tl.trans(values(k, i_b, o_t, T, i_h, H, o_k, K) * b_to)
        store_rows(answer, i_b, o_t, T, i_h, H, o_k, K, b_b)
        b_a = b_a.to(low)
        store_rows(recall, i_b, o_t, T, i_h, H, o_k, K, tl.dot(b_inverse, b_a, input_precision=PRECISION))
        b_read += tl.dot(b_adjoint_pairs, b_a, input_precision=PRECISION)
        store_rows(read, i_b, o_t, T, i_h, H, o_k, K, b_read)
        b_b = tl.trans(b_b)
        b_write += tl.dot(b_b, b_recall_pairs, input_precision=PRECISION)
        store_transposed(write, i_b, o_t, T, i_h, H, o_k, K, b_write)
        if BACK:
            b_adjoint = tl.dot(b_b, b_inverse, input_precision=PRECISION)
            store_transposed(adjoint, i_b, o_t, T, i_h, H, o_k, K, b_adjoint)
        b_across = tl.where(passed, b_start * b_end, 0.0)
        tl.store(across + ((i_b * M + i_m) * H + i_h) * K + o_k, b_across, mask=o_k < K)
