"""Triton kernels that choose the chunks: a summary of the keys, the exact scores, the approximate scores."""

import triton
import triton.language as tl

#: Coefficients of 2^f on [-1/2, 1/2], from f^4 down; relative error at most 2.7e-6 of either sign, so that what a sum
#: over a chunk keeps of it is the rounding of float32.
POWERS = ("0f3C1CCBDA", "0f3D650A2B", "0f3E76036E", "0f3F31706E", "0f3F7FFFF4")


def exp2_assembly(polynomials: int, pack: int = 4) -> str:
    """Return assembly that makes `pack` powers 2^(x scale), the last `polynomials` of them by polynomial.

    Operands are the powers, then as many x and as many scales. The special-function unit makes 16 exponentials a cycle
    and is what the exact choice waits for, while the multiply-add units, with 128 operations a cycle, have room.
    Arguments must be below 100 in size.
    """
    lines = ["{", ".reg .f32 t, r, f, p;", ".reg .b32 i, j;"]
    for n in range(pack):
        x, scale = f"${n + pack}", f"${n + 2 * pack}"
        if n < pack - polynomials:
            lines += [f"mul.f32 ${n}, {x}, {scale};", f"ex2.approx.ftz.f32 ${n}, ${n};"]
            continue
        # Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits.
        lines += [f"fma.rn.f32 t, {x}, {scale}, 0f4B400000;", "sub.f32 r, 0f4B400000, t;"]
        lines += [f"fma.rn.f32 f, {x}, {scale}, r;", f"fma.rn.f32 p, f, {POWERS[0]}, {POWERS[1]};"]
        lines += [f"fma.rn.f32 p, p, f, {power};" for power in POWERS[2:]]
        lines += ["mov.b32 i, t;", "shl.b32 i, i, 23;", "mov.b32 j, p;", "add.s32 j, j, i;", f"mov.b32 ${n}, j;"]
    return "\n".join([*lines, "}"])


@triton.jit
def exp2_scaled(s, scale, ASSEMBLY: tl.constexpr):
    """Return 2^(s * scale) for |s * scale| < 100; an empty ASSEMBLY leaves it to the special-function unit."""
    if ASSEMBLY == "":
        out = tl.exp2(s * scale)
    else:
        out = tl.inline_asm_elementwise(
            ASSEMBLY, "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f", [s, scale], dtype=tl.float32, is_pure=True, pack=4
        )
    return out


@triton.jit(do_not_specialize=["M"])
def summarise_kernel(
    p_k,
    p_grid,
    p_high,
    p_low,
    p_norm,
    stride_t,
    stride_g,
    M,
    G: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    MEAN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Write each chunk's mean key, or the largest squared norm of all keys of a head.

    SPLIT writes the mean as the sum of two numbers of the keys' dtype, so that it keeps twice their precision.
    """
    # Heads are the first index: what they read is adjacent in memory.
    m = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    start = tl.load(p_grid + 3 * m)
    end = tl.load(p_grid + 3 * m + 1)
    o_k = tl.arange(0, BK)
    total = tl.zeros([BK], tl.float32)
    largest = 0.0
    for n in range(0, C, BN):
        o_s = start + n + tl.arange(0, BN)
        mask = (o_s[:, None] < end) & (o_k[None, :] < K)
        b_k = tl.load(p_k + o_s.to(tl.int64)[:, None] * stride_t + g * stride_g + o_k, mask, other=0.0).to(tl.float32)
        if MEAN:
            total += tl.sum(b_k, 0)
        else:
            largest = tl.maximum(largest, tl.max(tl.sum(b_k * b_k, 1), 0))
    if MEAN:
        mean = total / tl.maximum(end - start, 1)
        p_mean = (g * M + m) * K + o_k
        high = mean.to(p_high.dtype.element_ty)
        tl.store(p_high + p_mean, high, o_k < K)
        if SPLIT:
            tl.store(p_low + p_mean, (mean - high.to(tl.float32)).to(p_low.dtype.element_ty), o_k < K)
    else:
        tl.atomic_max(p_norm + g, largest)


@triton.jit
def insert(best, index, score, chunk, R: tl.constexpr):
    """Put `score` [BQ] of `chunk` into the list `best`, `index` in place of the worst, if it is better.

    Among equals the later chunk goes. A list of one is [BQ]; longer ones are [BQ, R], and their indices differ, also
    those of empty places (below 0, score -inf).
    """
    if R == 1:
        better = score > best
        best = tl.where(better, score, best)
        index = tl.where(better, chunk, index)
    else:
        worst = tl.min(best, 1)
        last = tl.max(tl.where(best == worst[:, None], index, -(1 << 30)), 1)
        out = (score > worst)[:, None] & (index == last[:, None])
        best = tl.where(out, score[:, None], best)
        index = tl.where(out, (chunk + tl.zeros_like(last))[:, None], index)
    return best, index


@triton.jit
def insert_tile(best, index, scores, low, REMOTE: tl.constexpr, R: tl.constexpr):
    """Put the REMOTE best of `scores` [BQ, NC] of the chunks low, low + 1, ... into the list."""
    column = low + tl.arange(0, scores.shape[1])
    for _ in tl.static_range(REMOTE):
        top = tl.max(scores, 1)
        at = tl.min(tl.where(scores == top[:, None], column[None, :], 1 << 30), 1)
        best, index = insert(best, index, top, at, R)
        if REMOTE > 1:
            scores = tl.where(column[None, :] == at[:, None], float("-inf"), scores)
    return best, index


@triton.jit
def empty_list(BQ: tl.constexpr, REMOTE: tl.constexpr, R: tl.constexpr):
    """Return a list of REMOTE empty places; R rounds REMOTE up, the places beyond are never the worst."""
    if R == 1:
        best = tl.full([BQ], float("-inf"), tl.float32)
        index = tl.full([BQ], -1, tl.int32)
    else:
        place = tl.arange(0, R)[None, :] + tl.zeros([BQ, R], tl.int32)
        best = tl.where(place < REMOTE, float("-inf"), float("inf"))
        index = tl.where(place < REMOTE, -1 - place, (1 << 29) + place)
    return best, index


@triton.jit
def store_list(best, index, p_choice, mask, REMOTE: tl.constexpr, R: tl.constexpr):
    """Write the list in descending order, -1 at empty places."""
    if R == 1:
        tl.store(p_choice, index, mask)
    else:
        best = tl.where(best == float("inf"), float("-inf"), best)
        for j in tl.static_range(REMOTE):
            top = tl.max(best, 1)
            at = tl.min(tl.where(best == top[:, None], index, 1 << 30), 1)
            tl.store(p_choice + j, tl.where(top > float("-inf"), at, -1), mask)
            best = tl.where(index == at[:, None], float("-inf"), best)


@triton.jit(do_not_specialize=["N"])
def choose_exact_kernel(
    p_q,
    p_k,
    p_grid,
    p_own,
    p_norm,
    p_choice,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kg,
    N,
    scale2,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    REMOTE: tl.constexpr,
    R: tl.constexpr,
    BOUNDED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Choose by attention mass: sum_s 2^(scale2 * q.k_s), compared through its logarithm unless BOUNDED.

    No score is larger than the product of the norms. Where that is small (normalised queries and keys) the masses are
    compared as they are, without maximum and logarithm: BOUNDED. Both variants are launched; each takes its own tiles.
    """
    o_t = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ + tl.arange(0, BQ)
    h = tl.program_id(1).to(tl.int64)
    g = h // GROUP
    o_k = tl.arange(0, BK)
    m_t = o_t < N
    own = tl.load(p_own + o_t, m_t, other=0)
    first = tl.load(p_grid + 3 * own + 2, m_t, other=1 << 30)
    b_q = tl.load(
        p_q + o_t.to(tl.int64)[:, None] * stride_qt + h * stride_qh + o_k,
        m_t[:, None] & (o_k[None, :] < K),
        other=0.0,
    )
    wide = b_q.to(tl.float32)
    bound = tl.sqrt(tl.max(tl.sum(wide * wide, 1), 0) * tl.load(p_norm + g)) * scale2
    if (bound < 60.0) != BOUNDED:
        return
    best, index = empty_list(BQ, REMOTE, R)
    low = tl.min(first, 0)
    # One turn for each sequence that has queries in this tile.
    while low < (1 << 30):
        inside = first == low
        high = tl.max(tl.where(inside, own, low), 0)
        start = tl.load(p_grid + 3 * low)
        if C >= BN:
            for c in range(low, high):
                total = tl.zeros([BQ], tl.float32)
                top = tl.full([BQ], float("-inf"), tl.float32)
                for n in tl.static_range(C // BN):
                    o_s = (start + (c - low) * C + n * BN).to(tl.int64) + tl.arange(0, BN)
                    b_k = tl.load(
                        p_k + o_s[None, :] * stride_kt + g * stride_kg + o_k[:, None], o_k[:, None] < K, other=0.0
                    )
                    s = tl.dot(b_q, b_k, input_precision="ieee")
                    if BOUNDED:
                        total += tl.sum(exp2_scaled(s, scale2, ASSEMBLY), 1)
                    else:
                        higher = tl.maximum(top, tl.max(s, 1) * scale2)
                        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(s * scale2 - higher[:, None]), 1)
                        top = higher
                score = total if BOUNDED else top + tl.log2(total)
                score = tl.where(inside & (c < own), score, float("-inf"))
                best, index = insert(best, index, score, c, R)
        else:
            for c in range(low, high, BN // C):
                o_s = start + (c - low) * C + tl.arange(0, BN)
                b_k = tl.load(
                    p_k + o_s.to(tl.int64)[None, :] * stride_kt + g * stride_kg + o_k[:, None],
                    (o_k[:, None] < K) & (o_s[None, :] < N),
                    other=0.0,
                )
                s = tl.reshape(tl.dot(b_q, b_k, input_precision="ieee") * scale2, [BQ, BN // C, C])
                if BOUNDED:
                    scores = tl.sum(tl.exp2(s), 2)
                else:
                    top = tl.max(s, 2)
                    scores = top + tl.log2(tl.sum(tl.exp2(s - top[:, :, None]), 2))
                column = c + tl.arange(0, BN // C)
                scores = tl.where(inside[:, None] & (column[None, :] < own[:, None]), scores, float("-inf"))
                best, index = insert_tile(best, index, scores, c, REMOTE, R)
        low = tl.min(tl.where(first > low, first, 1 << 30), 0)
    store_list(best, index, p_choice + (o_t.to(tl.int64) * H + h) * REMOTE, m_t, REMOTE, R)


@triton.jit
def mean_scores(b_q, p_high, p_low, rows, o_k, mask, K: tl.constexpr, SPLIT: tl.constexpr):
    """Return q.mean [BQ, BM] for the mean keys at `rows` [BM]."""
    offset = rows[None, :] * K + o_k[:, None]
    s = tl.dot(b_q, tl.load(p_high + offset, mask, other=0.0), input_precision="ieee")
    if SPLIT:
        s = tl.dot(b_q, tl.load(p_low + offset, mask, other=0.0), s, input_precision="ieee")
    return s


@triton.jit(do_not_specialize=["N", "M"])
def choose_approx_kernel(
    p_q,
    p_high,
    p_low,
    p_grid,
    p_own,
    p_choice,
    stride_qt,
    stride_qh,
    N,
    M,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BQ: tl.constexpr,
    BM: tl.constexpr,
    REMOTE: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Choose by the score of the mean key."""
    o_t = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ + tl.arange(0, BQ)
    h = tl.program_id(1).to(tl.int64)
    base = h // GROUP * M
    o_k = tl.arange(0, BK)
    m_t = o_t < N
    own = tl.load(p_own + o_t, m_t, other=0)
    first = tl.load(p_grid + 3 * own + 2, m_t, other=1 << 30)
    b_q = tl.load(
        p_q + o_t.to(tl.int64)[:, None] * stride_qt + h * stride_qh + o_k,
        m_t[:, None] & (o_k[None, :] < K),
        other=0.0,
    )
    best, index = empty_list(BQ, REMOTE, R)
    low = tl.min(first, 0)
    while low < (1 << 30):
        inside = first == low
        high = tl.max(tl.where(inside, own, low), 0)
        # Up to here every chunk is a candidate of every query of the tile.
        shared = tl.min(tl.where(inside, own, low), 0)
        shared = low + (shared - low) // BM * BM
        for c in range(low, shared, BM):
            s = mean_scores(b_q, p_high, p_low, base + c + tl.arange(0, BM), o_k, o_k[:, None] < K, K, SPLIT)
            best, index = insert_tile(best, index, s, c, REMOTE, R)
        for c in range(shared, high, BM):
            column = c + tl.arange(0, BM)
            mask = (o_k[:, None] < K) & (column[None, :] < high)
            s = mean_scores(b_q, p_high, p_low, base + column, o_k, mask, K, SPLIT)
            s = tl.where(inside[:, None] & (column[None, :] < own[:, None]), s, float("-inf"))
            best, index = insert_tile(best, index, s, c, REMOTE, R)
        low = tl.min(tl.where(first > low, first, 1 << 30), 0)
    store_list(best, index, p_choice + (o_t.to(tl.int64) * H + h) * REMOTE, m_t, REMOTE, R)
