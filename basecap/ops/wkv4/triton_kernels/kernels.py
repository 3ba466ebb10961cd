"""RWKV-4's weighted averages in Triton: a chunk of tokens and a block of channels per program, twice.

The first pass sums each chunk up, the second joins the summaries of the chunks before its own and continues from there.
A sequence of one chunk needs no first pass.
"""

import triton
import triton.language as tl

#: No weight: finite, so that differences of two such are numbers; far below any real logarithm of a weight.
NONE = tl.constexpr(-1e30)


@triton.jit
def _add(total, rest, x):
    """Return total + rest + x as a float32 and what its rounding leaves (Kahan), x not much larger than total."""
    x += rest
    new = total + x
    return new, x - (new - total)


@triton.jit
def _join(mean, mean_rest, weight, weight_rest, young_mean, young_weight, span):
    """Join a span of tokens and its younger neighbour, across which an older weight loses `span`.

    Mean and logarithm of weight of the older, and of both, come with a rest: what float32 rounds away at a token stays
    in the state as long as the token does, and the errors of all tokens that are remembered would add up.
    """
    # Knuth's difference, as span may be larger than weight.
    old = weight - span
    lost = old - weight
    weight_rest += (weight - (old - lost)) - (span + lost)
    gap = (old - young_weight) + weight_rest
    less = tl.exp(-tl.abs(gap))
    # log(1 + less) without losing what 1 + less rounds away.
    more = 1 + less
    log_more = tl.where(more == 1, less, tl.log(more) * less / tl.where(more == 1, 1.0, more - 1))
    # The lighter changes the heavier: the longer a token is remembered, the smaller are the changes and their errors.
    past = gap > 0
    heavy, light = tl.where(past, mean, young_mean), tl.where(past, young_mean, mean)
    mean, mean_rest = _add(heavy, tl.where(past, mean_rest, 0.0), (light - heavy) * (less / more))
    weight, weight_rest = _add(tl.where(past, old, young_weight), tl.where(past, weight_rest, 0.0), log_more)
    return mean, mean_rest, weight, weight_rest


@triton.jit
def _shares(gap):
    """The shares of the older and the younger of two weights whose logarithms differ by `gap`."""
    less = tl.exp(-tl.abs(gap))
    more = 1 / (1 + less)
    return tl.where(gap > 0, more, less * more), tl.where(gap > 0, less * more, more)


@triton.jit(do_not_specialize=["T", "M"])
def average_fwd_kernel(
    keys, values, decay, bonus, first, segments, sums, out, last, out_weights, out_means,
    T, D, CT, M, SUMMARY: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Outputs [B, T, D], the final state [B, 2, D], and weights and means [B, T + 1, D], see `operators.average`.

    `sums` [B, M - 1, 3, D] holds mean, weight and span of each of M chunks of CT tokens but the last; they are written
    with SUMMARY. The first state and the segments may be None.
    """
    i_c, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = o_d < D
    b_decay = tl.load(decay + o_d, mask=m, other=0.0).to(tl.float32)
    b_bonus = tl.load(bonus + o_d, mask=m, other=0.0).to(tl.float32)
    b_x, b_w = tl.zeros([BD], tl.float32), tl.full([BD], NONE, tl.float32)
    b_x_rest, b_w_rest = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    p_sums = sums + i_b * (M - 1) * 3 * D + o_d
    if not SUMMARY:
        if first is not None:
            p_first = first + i_b * 2 * D + o_d
            b_x = tl.load(p_first, mask=m, other=0.0)
            b_w = tl.maximum(tl.load(p_first + D, mask=m, other=0.0), NONE)
        for j in range(i_c):
            p = p_sums + j * 3 * D
            x, w, span = tl.load(p, mask=m), tl.load(p + D, mask=m), tl.load(p + 2 * D, mask=m)
            b_x, b_x_rest, b_w, b_w_rest = _join(b_x, b_x_rest, b_w, b_w_rest, x, w, span)
    # Of a whole chunk; CT is a power of two, so that nothing is rounded.
    b_span = CT * b_decay
    before = 0
    if segments is not None:
        before = tl.load(segments + i_b * T + tl.maximum(i_c * CT - 1, 0)).to(tl.int64)
    for t in range(i_c * CT, tl.minimum(T, (i_c + 1) * CT)):
        p = (i_b * T + t) * D + o_d
        w = tl.maximum(tl.load(keys + p, mask=m, other=0.0).to(tl.float32), NONE)
        x = tl.load(values + p, mask=m, other=0.0).to(tl.float32)
        if segments is not None:
            now = tl.load(segments + i_b * T + t).to(tl.int64)
            b_w, b_span = tl.where(now == before, b_w, NONE), tl.where(now == before, b_span, -NONE)
            before = now
        if not SUMMARY:
            older, younger = _shares(((b_w - w) - b_bonus) + b_w_rest)
            o = tl.where(older > younger, b_x + younger * (x - b_x), x + older * (b_x - x))
            tl.store(out + p, o.to(out.dtype.element_ty), mask=m)
            p += i_b * D
            tl.store(out_means + p, b_x, mask=m)
            tl.store(out_weights + p, tl.where(b_w < 0.5 * NONE, float("-inf"), b_w), mask=m)
        b_x, b_x_rest, b_w, b_w_rest = _join(b_x, b_x_rest, b_w, b_w_rest, x, w, b_decay)
    if SUMMARY:
        p = p_sums + i_c * 3 * D
        tl.store(p, b_x, mask=m)
        tl.store(p + D, b_w, mask=m)
        tl.store(p + 2 * D, b_span, mask=m)
    elif i_c == M - 1:
        b_w = tl.where(b_w < 0.5 * NONE, float("-inf"), b_w)
        p = last + i_b * 2 * D + o_d
        tl.store(p, b_x, mask=m)
        tl.store(p + D, b_w, mask=m)
        p = (i_b * (T + 1) + T) * D + o_d
        tl.store(out_means + p, b_x, mask=m)
        tl.store(out_weights + p, b_w, mask=m)


@triton.jit(do_not_specialize=["T", "M"])
def average_bwd_kernel(
    do, dlast, keys, values, decay, bonus, weights, means, sums, dk, dv, dfirst, parts,
    T, D, CT, M, SUMMARY: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, values and the first state, and what each chunk adds to those of decay and bonus.

    Chunks and tokens count from the end. `sums` [B, M - 1, 3, D], float64, holds what each chunk makes of G and Q that
    enter it, see `operators`; `parts` is [B, M, 2, D]. The gradients of outputs and final state may be None.
    """
    i_c, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = o_d < D
    b_decay = tl.load(decay + o_d, mask=m, other=0.0).to(tl.float32)
    b_bonus = tl.load(bonus + o_d, mask=m, other=0.0).to(tl.float32)
    # In float32 each token's rounding would go on with it to all the tokens before that it reaches.
    b_share, b_x, b_y = tl.full([BD], 1.0, tl.float64), tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64)
    b_ddecay, b_dbonus = tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64)
    p_sums, p_state, p_found = sums + i_b * (M - 1) * 3 * D + o_d, i_b * 2 * D + o_d, i_b * (T + 1) * D + o_d
    if not SUMMARY:
        if dlast is not None:
            dx, dw = tl.load(dlast + p_state, mask=m, other=0.0), tl.load(dlast + p_state + D, mask=m, other=0.0)
            b_x = dx.to(tl.float64)
            b_y = (dx * tl.load(means + (i_b * (T + 1) + T) * D + o_d, mask=m, other=0.0) - dw).to(tl.float64)
        for j in range(i_c):
            p = p_sums + j * 3 * D
            share, x, y = tl.load(p, mask=m), tl.load(p + D, mask=m), tl.load(p + 2 * D, mask=m)
            b_x, b_y = x + share * b_x, y + share * b_y
    for i in range(i_c * CT, tl.minimum(T, (i_c + 1) * CT)):
        p = (i_b * T + T - 1 - i) * D + o_d
        k = tl.maximum(tl.load(keys + p, mask=m, other=0.0).to(tl.float32), NONE)
        v = tl.load(values + p, mask=m, other=0.0).to(tl.float32)
        w = tl.maximum(tl.load(weights + p + i_b * D, mask=m, other=0.0), NONE)
        x = tl.load(means + p + i_b * D, mask=m, other=0.0)
        older, younger = _shares((w - k) - b_bonus)
        past, own = _shares((w - b_decay) - k)
        # Near one, float32 would round it more coarsely than the small share, and hundreds of its roundings add up.
        past = tl.where(own < past, 1 - own.to(tl.float64), past)
        past = tl.where(w > NONE, past, 0.0)
        own = tl.where(k > NONE, own, 0.0)
        g, dw = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
        if do is not None:
            g = tl.load(do + p, mask=m, other=0.0).to(tl.float32)
            dw = g * (x - v) * (older * younger)
        if not SUMMARY:
            G, Q = b_x.to(tl.float32), b_y.to(tl.float32)
            tl.store(dk + p, (own * (v * G - Q) - dw).to(dk.dtype.element_ty), mask=m)
            tl.store(dv + p, (own * G + younger * g).to(dv.dtype.element_ty), mask=m)
            b_ddecay += past * (Q - x * G)
            b_dbonus -= dw
        dx = g * older
        b_share *= past
        b_x, b_y = dx + past * b_x, (dx * x - dw) + past * b_y
    if SUMMARY:
        p = p_sums + i_c * 3 * D
        tl.store(p, b_share, mask=m)
        tl.store(p + D, b_x, mask=m)
        tl.store(p + 2 * D, b_y, mask=m)
    else:
        p = parts + (i_b * M + i_c) * 2 * D + o_d
        tl.store(p, b_ddecay.to(tl.float32), mask=m)
        tl.store(p + D, b_dbonus.to(tl.float32), mask=m)
        if i_c == M - 1:
            x = tl.load(means + p_found, mask=m, other=0.0)
            weighs = tl.load(weights + p_found, mask=m, other=0.0) > NONE
            G, Q = tl.where(weighs, b_x, 0.0).to(tl.float32), tl.where(weighs, b_y, 0.0).to(tl.float32)
            tl.store(dfirst + p_state, G, mask=m)
            tl.store(dfirst + p_state + D, x * G - Q, mask=m)


@triton.jit(do_not_specialize=["R"])
def rates_bwd_kernel(parts, ddecay, dbonus, D, R, BR: tl.constexpr, BD: tl.constexpr):
    """Gradients of decay and bonus [D]: sums of `parts` [R, 2, D]."""
    o_d, o_r = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BR).to(tl.int64)
    b_ddecay, b_dbonus = tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64)
    for i in range(0, R, BR):
        p = parts + (i + o_r)[:, None] * 2 * D + o_d[None, :]
        m = (i + o_r < R)[:, None] & (o_d < D)[None, :]
        b_ddecay += tl.sum(tl.load(p, mask=m, other=0.0).to(tl.float64), 0)
        b_dbonus += tl.sum(tl.load(p + D, mask=m, other=0.0).to(tl.float64), 0)
    tl.store(ddecay + o_d, b_ddecay.to(ddecay.dtype.element_ty), mask=o_d < D)
    tl.store(dbonus + o_d, b_dbonus.to(dbonus.dtype.element_ty), mask=o_d < D)
