"""The delta rule by channel in chunks in Triton: scores of a chunk, and what the walk over the chunks needs; README.md.

Tensors: q, k, erased, log_decay and all that is known of single tokens [B, T, H, K]; matrices between the BT tokens of
a chunk [B, M, H, BT, BT]; the decays across chunks [B, M, H, K] float32; all contiguous. `starts` [B, T] is not zero
where the state is emptied before a token; it may be None.
"""

import triton
import triton.language as tl

from basecap.ops._recurrence.kernels_chunks import invert, store_rows, values
from basecap.ops._recurrence.kernels_joins import in_right, join, joined
from basecap.ops._recurrence.kernels_tiles import matrix
from basecap.ops.kernels_shared import add_product, exp


@triton.jit
def log_decays(log_decay, starts, i_b, o_t, T, i_h, H, o_k, K):
    """Log decays of tokens, zero behind the end; nothing is left before a token where the state is emptied."""
    b_log = values(log_decay, i_b, o_t, T, i_h, H, o_k, K)
    if starts is not None:
        empty = tl.load(starts + i_b * T + o_t, mask=o_t < T, other=0)[:, None] != 0
        b_log = tl.where(empty, float("-inf"), b_log)
    return b_log


@triton.jit
def edges(log_decay, starts, i_b, i_m, T, i_h, H, o_k, K, EXACT: tl.constexpr, BT: tl.constexpr):
    """The decays from a chunk's start to each token, its own included, from each token to its end, and across it."""
    o_c = tl.arange(0, BT)
    b_log = log_decays(log_decay, starts, i_b, i_m * BT + o_c, T, i_h, H, o_k, K)
    # What follows a token is summed up over the tokens one further: nothing is subtracted.
    b_next = log_decays(log_decay, starts, i_b, i_m * BT + o_c + 1, T, i_h, H, o_k, K)
    b_next = tl.where(o_c[:, None] == BT - 1, 0.0, b_next)
    b_from, b_to = exp(tl.cumsum(b_log, 0), EXACT), exp(tl.cumsum(b_next, 0, reverse=True), EXACT)
    # The state meets one of the last per chunk: errors of the GPU's fast exponential would add up.
    return b_from, b_to, exp(tl.sum(b_log, 0), True)


@triton.jit
def scores_fwd_kernel(
    q, k, erased, log_decay, starts, read_pairs, inverse,
    T, H, K, M,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
    LEVELS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What each token reads of the writes of a chunk, and the inverse of the chunk's triangular system.

    In one matrix, by one product per join: [t, s] with t behind s is what t erases of the write of s, with t before s
    what s reads of the write of t.
    """
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_c = tl.arange(0, BT)
    o_t = i_m * BT + o_c
    low = read_pairs.dtype.element_ty
    b_own = tl.zeros([BT], dtype=tl.float32)
    b_both = tl.zeros([BT, BT], dtype=tl.float32)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_q = values(q, i_b, o_t, T, i_h, H, o_k, K)
        b_k = values(k, i_b, o_t, T, i_h, H, o_k, K)
        b_e = values(erased, i_b, o_t, T, i_h, H, o_k, K)
        b_own += tl.sum(b_q * b_k, 1)
        # A token reads after its own decay and writes after it.
        b_all = log_decays(log_decay, starts, i_b, o_t, T, i_h, H, o_k, K)
        b_from = b_all
        b_to = tl.zeros([BT, BK], dtype=tl.float32)
        for level in tl.static_range(LEVELS):
            # Right blocks read and erase what left ones write.
            right = in_right(o_c, level)[:, None]
            b_decay = exp(tl.where(right, b_from, b_to), EXACT)
            b_erases = (tl.where(right, b_e, b_k) * b_decay).to(low)
            b_reads = (tl.where(right, b_q, b_k) * b_decay).to(low)
            b_pairs = tl.dot(b_erases, tl.trans(b_reads), input_precision=PRECISION)
            b_both += tl.where(joined(o_c, level), b_pairs, 0.0)
            b_from, b_to, b_all = join(b_from, b_to, b_all, level)
    b_reads = tl.where(o_c[:, None] < o_c[None, :], b_both, 0.0)
    b_reads += tl.where(o_c[:, None] == o_c[None, :], b_own[:, None], 0.0)
    tl.store(matrix(read_pairs, i_b, i_m, i_h, M, H, BT, TURNED=True), b_reads.to(low))
    b_erases = tl.where(o_c[:, None] > o_c[None, :], -b_both, 0.0)
    b_inverse = invert(b_erases, o_c, tl.float32, INVERSE, LEVELS)
    tl.store(matrix(inverse, i_b, i_m, i_h, M, H, BT), b_inverse.to(low))


@triton.jit
def parts_fwd_kernel(
    q, k, erased, log_decay, starts, read_pairs, inverse, found, read, write, answer, across, value_pairs,
    T, H, K, M,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Everything about a chunk but its state and values; see README.md."""
    i_h, i_m, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = i_m * BT + tl.arange(0, BT)
    low = read.dtype.element_ty
    b_inverse = tl.load(matrix(inverse, i_b, i_m, i_h, M, H, BT))
    b_pairs = tl.load(matrix(read_pairs, i_b, i_m, i_h, M, H, BT))
    b_pairs = tl.dot(b_pairs, b_inverse, input_precision=PRECISION).to(low)
    tl.store(matrix(value_pairs, i_b, i_m, i_h, M, H, BT), b_pairs)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_from, b_to, b_across = edges(log_decay, starts, i_b, i_m, T, i_h, H, o_k, K, EXACT, BT)
        tl.store(across + ((i_b * M + i_m) * H + i_h) * K + o_k, b_across, mask=o_k < K)
        b_e = (values(erased, i_b, o_t, T, i_h, H, o_k, K) * -b_from).to(low)
        store_rows(found, i_b, o_t, T, i_h, H, o_k, K, tl.dot(b_inverse, b_e, input_precision=PRECISION))
        b_read = values(q, i_b, o_t, T, i_h, H, o_k, K) * b_from
        b_read = add_product(b_read, b_pairs, b_e, PRECISION)
        store_rows(read, i_b, o_t, T, i_h, H, o_k, K, b_read)
        b_k = (values(k, i_b, o_t, T, i_h, H, o_k, K) * b_to).to(low)
        store_rows(answer, i_b, o_t, T, i_h, H, o_k, K, b_k)
        b_write = tl.dot(tl.trans(b_inverse), b_k, input_precision=PRECISION)
        store_rows(write, i_b, o_t, T, i_h, H, o_k, K, b_write)
