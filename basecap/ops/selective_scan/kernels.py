"""The selective scan in Triton: chunks of BT tokens, blocks of BD channels; see README.md.

Tensors: x, dt, y [B, T, D]; B, C [B, N, M BT] in float32, padded with zeros to M chunks, so that a chunk's tokens lie
together; states between chunks [B, M, N, D]; all contiguous. A [N, D] is in units of log2: decays are exp2(A dt).
`ids` are the segments [B, T], or None. Past the end of a sequence dt, x and dy are zero, which leaves every state as
it is.
"""

import triton
import triton.language as tl

from basecap.ops.kernels_shared import exp2

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _join(decay_1, value_1, decay_2, value_2):
    """Join two neighbouring spans of h -> decay h + value."""
    return decay_1 * decay_2, decay_2 * value_1 + value_2


@triton.jit
def _join_before(decay_1, value_1, before_1, rest_1, decay_2, value_2, before_2, rest_2):
    """The same, keeping (before, rest) of the map that stops short of the span's last token."""
    return decay_1 * decay_2, decay_2 * value_1 + value_2, decay_1 * before_2, before_2 * value_1 + rest_2


@triton.jit
def _row(b_x, o_row, row):
    """Row `row` of a block; free where rows lie in one lane, since integer zeros, unlike float ones, need no adding."""
    b_bits = tl.where((o_row == row)[:, None], b_x.to(tl.int32, bitcast=True), 0)
    return tl.sum(b_bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _power(b_x):
    """2^x, at most 1.4 * 2^-24 off with fused multiply-adds, 0 below -126: a state takes one of these for each chunk.

    The hardware's errs by two units in the last place, and what it errs by in the mean adds up along T.
    """
    b_whole = tl.floor(tl.minimum(tl.maximum(b_x, -126.0), 128.0) + 0.5)
    b_part = b_x - b_whole
    b_out = 0.00015461444854736328 * b_part + 0.0013400427997112274
    b_out = b_out * b_part + 0.009618056938052177
    b_out = b_out * b_part + 0.05550327152013779
    b_out = b_out * b_part + 0.24022650718688965
    b_out = b_out * b_part + 0.6931471824645996
    b_out = b_out * b_part + 1.0
    b_scale = ((b_whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(b_x < -126.0, 0.0, b_out * b_scale)


@triton.jit
def _begins(ids, p_ids, o_t, m_t):
    """Which tokens begin a segment."""
    b_ids = tl.load(ids + p_ids + o_t, mask=m_t, other=0)
    return b_ids != tl.load(ids + p_ids + tl.maximum(o_t - 1, 0), mask=m_t, other=0)


@triton.jit
def _order(i_m, BACK: tl.constexpr, BT: tl.constexpr):
    """The tokens of chunk `i_m`, as a walk meets them."""
    if BACK:
        # Last token first: Triton's own reversed scan would exchange everything between lanes.
        return i_m * BT + BT - 1 - tl.arange(0, BT)
    return i_m * BT + tl.arange(0, BT)


@triton.jit
def _tokens(dt, x, row, o_t, o_d, T, D):
    """Step sizes and inputs of a chunk, zero outside the row that begins at token `row`."""
    m = ((o_t >= 0) & (o_t < T))[:, None] & (o_d < D)[None, :]
    p = (row + o_t)[:, None] * D + o_d[None, :]
    return tl.load(dt + p, mask=m, other=0.0), tl.load(x + p, mask=m, other=0.0)


# The width D stays unspecialised: known to be a multiple of 16 it would make the loads wider, and with them spread
# a chunk's tokens over lanes, so that every scan would shuffle.


@triton.jit(do_not_specialize=["D"])
def walk_fwd_kernel(
    x, dt, A, W, C, ids, first, y, states, last, total,
    T, D, N, M, span,
    BACK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Walk `span` tokens from the state `first` to `last`, [B, spans, N, D], with BN of the N states in registers.

    BN divides N, and ROWS is the next power of two. On the way, each unless None: what these states add to the outputs
    y [N / BN, B, T, D], the states before each chunk, the sum of dt over the span.
    With BACK from the last token to the first, for the gradient of the state that a token receives: W = C, x the
    gradients of the outputs, `states` those that each chunk receives from what comes after it.
    """
    groups = N // BN
    i_g = tl.program_id(0) % groups
    i_s, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    end = tl.minimum((i_s + 1) * span, T)
    chunks = tl.cdiv(end - i_s * span, BT)
    o_row, o_n = tl.arange(0, BT), tl.arange(0, ROWS)
    o_d = tl.program_id(0) // groups * BD + tl.arange(0, BD)
    m_d = o_d < D
    m_state = (o_n < BN)[:, None] & m_d[None, :]
    p_state = (i_g * BN + o_n)[:, None] * D + o_d[None, :]
    p_span = (i_b * tl.num_programs(1) + i_s) * N * D
    b_h = tl.load(first + p_span + p_state, mask=m_state, other=0.0)
    b_total = tl.zeros([BD], tl.float32)
    i_m = i_s * (span // BT)
    step = 1
    if BACK:
        i_m += chunks - 1
        step = -1
    b_dt_next, b_x_next = _tokens(dt, x, i_b * T, _order(i_m, BACK, BT), o_d, T, D)
    for _ in range(chunks):
        b_dt, b_u = b_dt_next.to(tl.float32), b_x_next.to(tl.float32)
        # The next chunk's numbers are on their way while this one computes.
        b_dt_next, b_x_next = _tokens(dt, x, i_b * T, _order(i_m + step, BACK, BT), o_d, T, D)
        o_t = _order(i_m, BACK, BT)
        m_t = o_t < T
        if states is not None:
            tl.store(states + (i_b * M + i_m) * N * D + p_state, b_h, mask=m_state)
        b_span = tl.sum(b_dt, 0)
        if total is not None:
            b_total += b_span
        if ids is not None:
            b_new = _begins(ids, i_b * T, o_t, m_t)
        if not BACK:
            b_u = b_u * b_dt
        b_y = tl.zeros([BT, BD], tl.float32)
        for n in tl.static_range(BN):
            p_row = (i_b * N + i_g * BN + n) * M * BT + i_m * BT + o_row
            b_A = tl.load(A + (i_g * BN + n) * D + o_d, mask=m_d, other=0.0)
            b_W = tl.load(W + p_row)
            if BACK:
                b_W = tl.flip(b_W, 0)
            b_a = exp2(b_A[None, :] * b_dt, x.dtype.element_ty == tl.float32)
            if ids is not None:
                b_a = tl.where(b_new[:, None], 0.0, b_a)
            b_own = b_u * b_W[:, None]
            if BACK:
                b_own = b_a * b_own
            b_a, b_own = tl.associative_scan((b_a, b_own), 0, _join)
            b_before = _row(b_h, o_n, n)
            if y is not None:
                b_C = tl.load(C + p_row)
                b_y += b_C[:, None] * (b_a * b_before[None, :] + b_own)
            # A chunk's decay is one power, not the product of BT, whose errors would add up along T; where a segment
            # begins the product is zero.
            b_decay = tl.where(_row(b_a, o_row, BT - 1) > 0.0, _power(b_A * b_span), 0.0)
            b_last = b_decay * b_before + _row(b_own, o_row, BT - 1)
            b_h = tl.where((o_n == n)[:, None], b_last[None, :], b_h)
        if y is not None:
            p = ((i_g * tl.num_programs(2) + i_b) * T + o_t)[:, None] * D + o_d[None, :]
            tl.store(y + p, b_y.to(y.dtype.element_ty), mask=m_t[:, None] & m_d[None, :])
        i_m += step
    tl.store(last + p_span + p_state, b_h, mask=m_state)
    if total is not None:
        tl.store(total + (i_b * tl.num_programs(1) + i_s) * D + o_d, b_total, mask=m_d & (i_g == 0))


@triton.jit(do_not_specialize=["D"])
def carry_fwd_kernel(
    added, total, A, ids, first, states,
    T, D, N, S, span,
    BACK: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Chain the S spans: the state before each, from what each adds; with BACK from the end, the state after each."""
    n, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_A = tl.load(A + n * D + o_d, mask=m_d, other=0.0)
    b_state = tl.load(first + (i_b * N + n) * D + o_d, mask=m_d, other=0.0)
    b_one, b_none = tl.full([BS, BD], 1.0, tl.float32), tl.zeros([BS, BD], tl.float32)
    # BS spans at a time, so that their loads are in flight together.
    for i in range(0, S, BS):
        o_s = i + tl.arange(0, BS)
        if BACK:
            o_s = S - 1 - o_s
        m_s = (o_s >= 0) & (o_s < S)
        m = m_s[:, None] & m_d[None, :]
        o_row = i_b * S + o_s
        p = (o_row * N + n)[:, None] * D + o_d[None, :]
        b_added = tl.load(added + p, mask=m, other=0.0)
        b_total = tl.load(total + o_row[:, None] * D + o_d[None, :], mask=m, other=0.0)
        b_decay = _power(b_A[None, :] * b_total)
        if ids is not None:
            b_before = tl.load(ids + i_b * T + tl.maximum(o_s * span - 1, 0), mask=m_s, other=0)
            b_after = tl.load(ids + i_b * T + tl.minimum((o_s + 1) * span, T) - 1, mask=m_s, other=0)
            b_decay = tl.where((b_before == b_after)[:, None], b_decay, 0.0)
        b_decay, b_own, b_before_decay, b_before_own = tl.associative_scan(
            (b_decay, b_added, b_one, b_none), 0, _join_before
        )
        tl.store(states + p, b_before_decay * b_state[None, :] + b_before_own, mask=m)
        b_state = _row(b_decay * b_state[None, :] + b_own, tl.arange(0, BS), BS - 1)


@triton.jit
def _exchange(b_left, b_right):
    """Add halves of [R, 2, L]: afterwards half 0 holds those of `b_left`, half 1 those of `b_right`."""
    m_left = (tl.arange(0, 2) == 0)[None, :, None]
    return tl.where(m_left, b_left, b_right) + tl.flip(tl.where(m_left, b_right, b_left), 1)


@triton.jit
def _halve(b_x, BT: tl.constexpr, L: tl.constexpr):
    """Add halves of [BT, 2, L] to [BT, 2, L / 2]: what was the first bit of a row's number is now the half's."""
    b_first, b_second = tl.split(tl.permute(tl.reshape(b_x, [2, BT // 2, 2, L]), [1, 2, 3, 0]))
    return _exchange(tl.reshape(b_first, [BT, 2, L // 2]), tl.reshape(b_second, [BT, 2, L // 2]))


@triton.jit
def _sums(b_left, b_right, BT: tl.constexpr, BD: tl.constexpr):
    """Sums of two [BT, BD] over the channels, [BT / 4, 2, 2, 2].

    The axes are the last bits of a token's number, left or right, its first bit, its second bit. Where channels are
    lanes, an exchange serves two numbers as long as each half of the lanes wants another one.
    """
    b_x = _exchange(tl.reshape(b_left, [BT, 2, BD // 2]), tl.reshape(b_right, [BT, 2, BD // 2]))
    b_x = _halve(_halve(b_x, BT, BD // 2), BT, BD // 4)
    return tl.reshape(tl.sum(b_x, 2), [BT // 4, 2, 2, 2])


@triton.jit(do_not_specialize=["D"])
def scan_bwd_kernel(
    dy, x, dt, A, B, C, ids, states, later, dx, ddt, parts,
    T, D, N, M,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk, from the state before it and the gradient that this receives from after it (`later`).

    `parts` receives dB and dC of each block of channels, [blocks, B, 2, N, M BT]; what a chunk contributes to dA takes
    its place in `later`, which nobody else reads.
    """
    # Blocks and chunks share the first axis of the grid, the only one that reaches beyond 65,535.
    blocks = tl.cdiv(D, BD)
    i_d, i_m = (tl.program_id(0) % blocks).to(tl.int64), (tl.program_id(0) // blocks).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_row = tl.arange(0, BT)
    o_t = i_m * BT + o_row
    o_d = i_d * BD + tl.arange(0, BD)
    m_t, m_d = o_t < T, o_d < D
    m = m_t[:, None] & m_d[None, :]
    m_first = (o_row == 0)[:, None]
    p = (i_b * T + o_t)[:, None] * D + o_d[None, :]
    b_dt = tl.load(dt + p, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(x + p, mask=m, other=0.0).to(tl.float32) * b_dt
    b_dy = tl.load(dy + p, mask=m, other=0.0).to(tl.float32)
    b_du = tl.zeros([BT, BD], tl.float32)
    b_ddt = tl.zeros([BT, BD], tl.float32)
    # Adding -0.0, unlike 0.0, is nothing that a compiler must keep.
    b_one, b_none = tl.full([BT, BD], 1.0, tl.float32), tl.full([BT, BD], -0.0, tl.float32)
    if ids is not None:
        b_new = _begins(ids, i_b * T, o_t, m_t)
    p_state = (i_b * M + i_m) * N * D + o_d
    p_part = (i_d * tl.num_programs(2) + i_b) * 2 * N * M * BT + i_m * BT
    o_bit = tl.arange(0, 2)
    o_part = tl.arange(0, BT // 4)[:, None, None, None] + o_bit[None, :, None, None] * N * M * BT
    p_part += o_part + o_bit[None, None, :, None] * (BT // 2) + o_bit[None, None, None, :] * (BT // 4)
    b_A = tl.load(A + o_d, mask=m_d, other=0.0)
    b_state = tl.load(states + p_state, mask=m_d, other=0.0)
    b_later = tl.load(later + p_state, mask=m_d, other=0.0)
    for n in range(N):
        # The next turn's numbers are on their way while this one computes.
        m_next = m_d & (n + 1 < N)
        b_state_next = tl.load(states + p_state + (n + 1) * D, mask=m_next, other=0.0)
        b_later_next = tl.load(later + p_state + (n + 1) * D, mask=m_next, other=0.0)
        b_A_next = tl.load(A + (n + 1) * D + o_d, mask=m_next, other=0.0)
        p_row = (i_b * N + n) * M * BT + o_t
        b_B = tl.load(B + p_row)
        b_C = tl.load(C + p_row)
        b_a = exp2(b_A[None, :] * b_dt, x.dtype.element_ty == tl.float32)
        if ids is not None:
            b_a = tl.where(b_new[:, None], 0.0, b_a)
        b_own = b_u * b_B[:, None]
        b_own = tl.where(m_first, b_a * b_state[None, :] + b_own, b_own)
        b_before = tl.where(m_first, b_state[None, :], b_none)
        _, b_h, _, b_before = tl.associative_scan((b_a, b_own, b_one, b_before), 0, _join_before)
        # Last token first: Triton's own reversed scan would exchange everything between lanes.
        b_a = tl.flip(b_a, 0)
        b_dh = tl.flip(b_C[:, None] * b_dy, 0)
        b_dh = tl.where(m_first, b_dh + b_later[None, :], b_dh)
        _, b_passed, _, b_dh = tl.associative_scan((b_a, b_a * b_dh, b_one, b_dh), 0, _join_before)
        b_dh, b_passed = tl.flip(b_dh, 0), tl.flip(b_passed, 0)
        b_rate = b_passed * b_before
        b_du += b_dh * b_B[:, None]
        b_ddt += b_rate * b_A[None, :]
        tl.store(later + p_state + n * D, tl.sum(b_rate * b_dt, 0), mask=m_d)
        tl.store(parts + p_part + n * M * BT, _sums(b_dh * b_u, b_h * b_dy, BT, BD))
        b_A, b_state, b_later = b_A_next, b_state_next, b_later_next
    b_x = tl.load(x + p, mask=m, other=0.0).to(tl.float32)
    tl.store(dx + p, (b_du * b_dt).to(dx.dtype.element_ty), mask=m)
    tl.store(ddt + p, (b_ddt * LN2 + b_du * b_x).to(ddt.dtype.element_ty), mask=m)
