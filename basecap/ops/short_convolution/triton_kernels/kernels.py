"""The short convolution in Triton: a program walks a span of tokens of BD channels; see README.md.

Tensors: x, dy, dx, y [B, T, D], x and dy with strides of their own, given in multiples of ALIGN so that the compiler
knows how far loads may be vectorised; taps [W, D] and bias [D] in float32; `ids` are the segments [B, T] or None.
The walk keeps a window of W rows in registers and loads GROUP rows at a time; before the first token and after the last
rows are zero. A span has at least W - 1 tokens: the rows before one are all there or, at the first, all not.
"""

# Tuples grow here while a kernel is compiled, which mypy takes for a change of type.
# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl


@triton.jit
def _place(D, T, span, BD: tl.constexpr):
    """Channels, whether they exist, row of the batch, and number of the span; neighbours share their tokens."""
    blocks, spans = tl.cdiv(D, BD), tl.cdiv(T, span)
    i = tl.program_id(0)
    o_d = (i % blocks) * BD + tl.arange(0, BD)
    i_s = (i // blocks).to(tl.int64)
    return o_d, o_d < D, i_s // spans, i_s % spans


@triton.jit
def _rows(p_x, stride, t, stop, m_d, ALIGN: tl.constexpr, COUNT: tl.constexpr):
    """COUNT rows from token `t` on; zero from token `stop` on."""
    rows = ()
    p_x += t * stride * ALIGN
    for u in tl.static_range(COUNT):
        rows += (tl.load(p_x + u * stride * ALIGN, mask=m_d & (t + u < stop), other=0.0),)
    return rows


@triton.jit
def _wide(rows, COUNT: tl.constexpr):
    """The rows in float32."""
    wide = ()
    for u in tl.static_range(COUNT):
        wide += (rows[u].to(tl.float32),)
    return wide


@triton.jit
def _ids(p_ids, t, T, COUNT: tl.constexpr):
    """Segments of COUNT tokens from `t` on; outside the sequence those of its ends, where rows are zero."""
    ids = ()
    for u in tl.static_range(COUNT):
        ids += (tl.load(p_ids + tl.minimum(tl.maximum(t + u, 0), T - 1)),)
    return ids


@triton.jit
def _weights(taps, bias, o_d, m_d, D, W: tl.constexpr):
    """The W taps and the bias."""
    b_taps = ()
    for i in tl.static_range(W):
        b_taps += (tl.load(taps + i * D + o_d, mask=m_d, other=0.0),)
    b_bias = tl.zeros_like(b_taps[0])
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0)
    return b_taps, b_bias


@triton.jit
def short_convolution_fwd_kernel(
    x, taps, bias, ids, y,
    T, D, span, x_batch, x_token,
    W: tl.constexpr, SILU: tl.constexpr, X_ALIGN: tl.constexpr, GROUP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Convolve the `span` tokens of a program, a multiple of GROUP."""
    o_d, m_d, i_b, i_s = _place(D, T, span, BD)
    b_taps, b_bias = _weights(taps, bias, o_d, m_d, D, W)
    p_x = x + i_b * x_batch * X_ALIGN + o_d
    p_y = y + i_b * T * D + o_d
    first = i_s * span
    end = tl.minimum(first + span, T)
    past = _wide(_rows(p_x, x_token, first - W + 1, T, m_d & (first > 0), X_ALIGN, W - 1), W - 1)
    if ids is not None:
        past_ids = _ids(ids + i_b * T, first - W + 1, T, W - 1)
    for i in range(tl.cdiv(end - first, GROUP)):
        t = first + i * GROUP
        rows = past + _wide(_rows(p_x, x_token, t, T, m_d, X_ALIGN, GROUP), GROUP)
        past = rows[GROUP:]
        if ids is not None:
            near = past_ids + _ids(ids + i_b * T, t, T, GROUP)
            past_ids = near[GROUP:]
        for u in tl.static_range(GROUP):
            b_y = b_bias
            for j in tl.static_range(W):
                b_x = rows[u + j]
                if ids is not None:
                    b_x = tl.where(near[u + j] == near[u + W - 1], b_x, 0.0)
                b_y += b_taps[j] * b_x
            if SILU:
                b_y *= tl.sigmoid(b_y)
            tl.store(p_y + (t + u) * D, b_y.to(y.dtype.element_ty), mask=m_d & (t + u < end))


@triton.jit
def short_convolution_bwd_kernel(
    dy, x, taps, bias, ids, dx, parts,
    T, D, span, x_batch, x_token, dy_batch, dy_token,
    W: tl.constexpr, SILU: tl.constexpr, X_ALIGN: tl.constexpr, DY_ALIGN: tl.constexpr,
    GROUP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of the `span` tokens of a program; span + W - 1 is a multiple of GROUP.

    `parts` [programs along B T, W + 1, D] receives what these tokens add to the gradients of taps and, last, bias.
    """
    o_d, m_d, i_b, i_s = _place(D, T, span, BD)
    b_taps, b_bias = _weights(taps, bias, o_d, m_d, D, W)
    p_x = x + i_b * x_batch * X_ALIGN + o_d
    p_dy = dy + i_b * dy_batch * DY_ALIGN + o_d
    p_dx = dx + i_b * T * D + o_d
    first = i_s * span
    end = tl.minimum(first + span, T)
    past = _wide(_rows(p_x, x_token, first - W + 1, T, m_d & (first > 0), X_ALIGN, W - 1), W - 1)
    if ids is not None:
        past_ids = _ids(ids + i_b * T, first - W + 1, T, W - 1)
    b_none = tl.zeros([BD], tl.float32)
    # Gradients of the sums at the last W - 1 tokens; of those before the span nothing passes on.
    grads = (b_none,) * (W - 1)
    b_dtaps = (b_none,) * W
    b_dbias = b_none
    stop = tl.minimum(first + span + W - 1, T)
    next_x = _rows(p_x, x_token, first, stop, m_d, X_ALIGN, GROUP)
    next_dy = _rows(p_dy, dy_token, first, stop, m_d, DY_ALIGN, GROUP)
    for i in range(tl.cdiv(span + W - 1, GROUP)):
        t = first + i * GROUP
        rows = past + _wide(next_x, GROUP)
        group = _wide(next_dy, GROUP)
        past = rows[GROUP:]
        # The next turn's rows are on their way while this one computes.
        next_x = _rows(p_x, x_token, t + GROUP, stop, m_d, X_ALIGN, GROUP)
        next_dy = _rows(p_dy, dy_token, t + GROUP, stop, m_d, DY_ALIGN, GROUP)
        if ids is not None:
            near = past_ids + _ids(ids + i_b * T, t, T, GROUP)
            past_ids = near[GROUP:]
        for u in tl.static_range(GROUP):
            window = ()
            for j in tl.static_range(W):
                b_x = rows[u + j]
                if ids is not None:
                    b_x = tl.where(near[u + j] == near[u + W - 1], b_x, 0.0)
                window += (b_x,)
            b_g = group[u]
            if SILU:
                b_sum = b_bias
                for j in tl.static_range(W):
                    b_sum += b_taps[j] * window[j]
                b_gate = tl.sigmoid(b_sum)
                b_g *= b_gate * (1.0 + b_sum * (1.0 - b_gate))
            grads += (b_g,)
            # Tokens after the span are the next program's; they are here for what they pass back into the span.
            b_own = tl.where(t + u < end, b_g, 0.0)
            b_dbias += b_own
            sums = ()
            for j in tl.static_range(W):
                sums += (b_dtaps[j] + b_own * window[j],)
            b_dtaps = sums
            b_dx = b_none
            for j in tl.static_range(W):
                b_g = grads[u + j]
                if ids is not None:
                    b_g = tl.where(near[u + j] == near[u], b_g, 0.0)
                b_dx += b_taps[W - 1 - j] * b_g
            s = t + u - W + 1
            tl.store(p_dx + s * D, b_dx.to(dx.dtype.element_ty), mask=m_d & (s >= first) & (s < end))
        grads = grads[GROUP:]
    p_parts = parts + (i_b * tl.cdiv(T, span) + i_s) * (W + 1) * D + o_d
    for j in tl.static_range(W):
        tl.store(p_parts + j * D, b_dtaps[j], mask=m_d)
    tl.store(p_parts + W * D, b_dbias, mask=m_d)
