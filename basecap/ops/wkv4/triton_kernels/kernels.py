"""RWKV-4's weighted averages in Triton: a chunk of tokens and a block of channels per program, twice.

The first pass sums each chunk up, the second joins the summaries of the chunks before its own and continues from there.
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
def scan_fwd_kernel(
    weights, values, decay, starts, sums, out_weights, out_values,
    T, D, CT, SUMMARY: tl.constexpr, STARTS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Running weights and means [B, T, D]; `sums` [B, chunks of CT, 3, D] holds mean, weight and span of each chunk."""
    i_c, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = o_d < D
    b_decay = tl.load(decay + o_d, mask=m, other=0.0)
    b_x, b_w = tl.zeros([BD], tl.float32), tl.full([BD], NONE, tl.float32)
    b_x_rest, b_w_rest = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    p_sums = sums + i_b * tl.num_programs(1) * 3 * D + o_d
    if not SUMMARY:
        for j in range(i_c):
            p = p_sums + j * 3 * D
            x, w, span = tl.load(p, mask=m), tl.load(p + D, mask=m), tl.load(p + 2 * D, mask=m)
            b_x, b_x_rest, b_w, b_w_rest = _join(b_x, b_x_rest, b_w, b_w_rest, x, w, span)
    # Of a whole chunk; CT is a power of two, so that nothing is rounded; the last chunk's is not read.
    b_span = CT * b_decay
    for t in range(i_c * CT, tl.minimum(T, (i_c + 1) * CT)):
        p = (i_b * T + t) * D + o_d
        w = tl.maximum(tl.load(weights + p, mask=m, other=NONE), NONE)
        x = tl.load(values + p, mask=m, other=0.0)
        span = b_decay
        if STARTS:
            begins = tl.load(starts + i_b * T + t) != 0
            span, b_span = tl.where(begins, -NONE, span), tl.where(begins, -NONE, b_span)
        b_x, b_x_rest, b_w, b_w_rest = _join(b_x, b_x_rest, b_w, b_w_rest, x, w, span)
        if not SUMMARY:
            tl.store(out_values + p, b_x, mask=m)
            tl.store(out_weights + p, tl.where(b_w < 0.5 * NONE, float("-inf"), b_w), mask=m)
    if SUMMARY:
        p = p_sums + i_c * 3 * D
        tl.store(p, b_x, mask=m)
        tl.store(p + D, b_w, mask=m)
        tl.store(p + 2 * D, b_span, mask=m)


@triton.jit
def scan_bwd_kernel(shares, values, sums, out, T, D, BTD, CT, SUMMARY: tl.constexpr, BD: tl.constexpr):
    """x_t = value_t + share_{t+1} x_{t+1} for two values, `BTD` apart; chunks and tokens count from the end."""
    i_c, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = o_d < D
    # In float32 each token's rounding would go on with it to all the tokens before that it reaches.
    b_share, b_x, b_y = tl.full([BD], 1.0, tl.float64), tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64)
    p_sums = sums + i_b * tl.num_programs(1) * 3 * D + o_d
    if not SUMMARY:
        for j in range(i_c):
            p = p_sums + j * 3 * D
            share, x, y = tl.load(p, mask=m), tl.load(p + D, mask=m), tl.load(p + 2 * D, mask=m)
            b_x, b_y = x + share * b_x, y + share * b_y
    for i in range(i_c * CT, tl.minimum(T, (i_c + 1) * CT)):
        p = (i_b * T + T - 1 - i) * D + o_d
        share = tl.load(shares + p + D, mask=m & (i > 0), other=0.0)
        b_share *= share
        b_x = tl.load(values + p, mask=m, other=0.0) + share * b_x
        b_y = tl.load(values + BTD + p, mask=m, other=0.0) + share * b_y
        if not SUMMARY:
            tl.store(out + p, b_x, mask=m)
            tl.store(out + BTD + p, b_y, mask=m)
    if SUMMARY:
        p = p_sums + i_c * 3 * D
        tl.store(p, b_share, mask=m)
        tl.store(p + D, b_x, mask=m)
        tl.store(p + 2 * D, b_y, mask=m)
