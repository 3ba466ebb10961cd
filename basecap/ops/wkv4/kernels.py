"""RWKV-4's weighted averages in Triton: one program per row and block of channels, tiles of tokens in order."""

import triton
import triton.language as tl

#: No weight: finite, so that differences of two such are numbers; far below any real logarithm of a weight.
NONE = tl.constexpr(-1e30)


@triton.jit
def _join(mean_1, weight_1, span_1, mean_2, weight_2, span_2):
    """Join two neighbouring spans: mean, logarithm of weight, what an older weight loses across the span."""
    old = weight_1 - span_2
    gap = old - weight_2
    less = tl.exp(-tl.abs(gap))
    share = tl.where(gap > 0, 1.0, less) / (1 + less)
    # log(1 + less) without losing what 1 + less rounds away.
    more = 1 + less
    rest = tl.where(more == 1, less, tl.log(more) * less / tl.where(more == 1, 1.0, more - 1))
    return mean_2 + (mean_1 - mean_2) * share, tl.maximum(old, weight_2) + rest, span_1 + span_2


@triton.jit
def scan_fwd_kernel(
    weights, values, decay, starts, out_weights, out_values,
    T, D, STARTS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Running weights and means [B, T, D]."""
    i_b = tl.program_id(1).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_decay = tl.load(decay + o_d, mask=m_d, other=0.0)
    # What entered the tile.
    b_weight = tl.full([BD], NONE, tl.float32)
    b_mean = tl.zeros([BD], tl.float32)
    o_t = tl.arange(0, BT)
    first, last = (o_t == 0)[:, None], (o_t == BT - 1)[:, None]
    for i_t in range(tl.cdiv(T, BT)):
        o_row = i_t * BT + o_t
        m = (o_row < T)[:, None] & m_d[None, :]
        p = (i_b * T + o_row)[:, None] * D + o_d[None, :]
        # [BT, BD]; rows past the end weigh nothing and lose nothing: the last row always holds the final average.
        b_w = tl.maximum(tl.load(weights + p, mask=m, other=NONE), NONE)
        b_x = tl.load(values + p, mask=m, other=0.0)
        b_span = tl.where((o_row < T)[:, None], b_decay[None, :], 0.0)
        if STARTS:
            b_new = tl.load(starts + i_b * T + o_row, mask=o_row < T, other=0)
            b_span = tl.where((b_new != 0)[:, None], -NONE, b_span)
        x_0, w_0, _ = _join(b_mean[None, :], b_weight[None, :], 0.0, b_x, b_w, b_span)
        b_x, b_w = tl.where(first, x_0, b_x), tl.where(first, w_0, b_w)
        b_x, b_w, _ = tl.associative_scan((b_x, b_w, b_span), 0, _join)
        tl.store(out_values + p, b_x, mask=m)
        tl.store(out_weights + p, tl.where(b_w < 0.5 * NONE, float("-inf"), b_w), mask=m)
        b_mean = tl.sum(tl.where(last, b_x, 0.0), 0)
        b_weight = tl.sum(tl.where(last, b_w, 0.0), 0)


@triton.jit
def _chain(share_1, x_1, y_1, share_2, x_2, y_2):
    """Chain two linear recurrences of two values."""
    return share_1 * share_2, x_2 + share_2 * x_1, y_2 + share_2 * y_1


@triton.jit
def scan_bwd_kernel(shares, values, out, T, D, BTD, BT: tl.constexpr, BD: tl.constexpr):
    """x_t = value_t + share_{t+1} x_{t+1} for two values, `BTD` apart; the tiles run back from the last token."""
    i_b = tl.program_id(1).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_x0 = tl.zeros([BD], tl.float32)
    b_y0 = tl.zeros([BD], tl.float32)
    o_t = tl.arange(0, BT)
    first, last = (o_t == 0)[:, None], (o_t == BT - 1)[:, None]
    for i_t in range(tl.cdiv(T, BT)):
        o_row = T - 1 - i_t * BT - o_t
        m = (o_row >= 0)[:, None] & m_d[None, :]
        p = (i_b * T + o_row)[:, None] * D + o_d[None, :]
        b_share = tl.load(shares + p + D, mask=m & (o_row < T - 1)[:, None], other=0.0)
        b_x = tl.load(values + p, mask=m, other=0.0)
        b_y = tl.load(values + BTD + p, mask=m, other=0.0)
        b_x = tl.where(first, b_x + b_share * b_x0[None, :], b_x)
        b_y = tl.where(first, b_y + b_share * b_y0[None, :], b_y)
        _, b_x, b_y = tl.associative_scan((b_share, b_x, b_y), 0, _chain)
        tl.store(out + p, b_x, mask=m)
        tl.store(out + BTD + p, b_y, mask=m)
        b_x0 = tl.sum(tl.where(last, b_x, 0.0), 0)
        b_y0 = tl.sum(tl.where(last, b_y, 0.0), 0)
