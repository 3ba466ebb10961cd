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
#: 1 / LN2 in float32, as PyTorch divides by numbers on a GPU.
LOG2E = tl.constexpr(1.4426950216293335)
#: The lowest float32.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _join(decay_1, value_1, decay_2, value_2):
    """Join two neighbouring spans of h -> decay h + value."""
    return decay_1 * decay_2, decay_2 * value_1 + value_2


@triton.jit
def _chain(b_decay, b_value):
    """The states after each of a chunk's rows, from nothing before the first."""
    _, b_states = tl.associative_scan((b_decay, b_value), 0, _join)
    return b_states


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
def _begins(ids, i_b, start, o_row, T):
    """Which tokens of the chunk that begins at token `start` begin a segment; nothing is known of those beyond T."""
    o_t = start + o_row
    ids += i_b * T
    b_ids = tl.load(ids + o_t, mask=o_t < T, other=0)
    return b_ids != tl.load(ids + tl.maximum(o_t - 1, 0), mask=o_t < T, other=0)


@triton.jit
def _tokens(x, first, left, o_row, o_d, D):
    """Rows `first`, ... of the span [left, D] at x, zero beyond it; none where `first` is negative.

    A span is short enough for addresses of 32 bits, which spares the loops many instructions.
    """
    m = (o_row < tl.where(first < 0, 0, left - first))[:, None] & (o_d < D)[None, :]
    return tl.load(x + (first + o_row)[:, None] * D + o_d[None, :], mask=m, other=0.0)


@triton.jit
def _store_tokens(x, b_x, first, left, o_row, o_d, D):
    """Store what `_tokens` loads."""
    m = (o_row < left - first)[:, None] & (o_d < D)[None, :]
    tl.store(x + (first + o_row)[:, None] * D + o_d[None, :], b_x.to(x.dtype.element_ty), mask=m)


@triton.jit
def _turn(p_to, p_from, o_x, last_to, last_from, to_x, to_n, from_x, from_n, N, LOG2: tl.constexpr):
    """Copy rows o_x of [X, N], with these steps between numbers, in another dtype; zero from row `last_from` on.

    LOG2: in units of log2, finite.
    """
    o_x = o_x.to(tl.int64)[:, None]
    for n in range(0, N, 16):
        o_n = n + tl.arange(0, 16)[None, :]
        b_x = tl.load(p_from + o_x * from_x + o_n * from_n, mask=(o_x < last_from) & (o_n < N), other=0.0)
        if LOG2:
            b_x = b_x.to(tl.float32) * LOG2E
            b_x = tl.where(b_x < LOWEST, LOWEST, b_x)
        if p_to.dtype.element_ty.primitive_bitwidth == 16:
            b_x = b_x.to(tl.float32)
        b_x = b_x.to(p_to.dtype.element_ty)
        tl.store(p_to + o_x * to_x + o_n * to_n, b_x, mask=(o_x < last_to) & (o_n < N))


@triton.jit(do_not_specialize=["D", "T", "P"])
def prepare_fwd_kernel(
    A, B, C, A_ND, B_BNT, C_BNT,
    T, D, N, P, A_d, A_n, B_b, B_t, B_n, C_b, C_t, C_n,
    BX: tl.constexpr,
):  # fmt: skip
    """Write A [N, D] in units of log2, and B and C [B, N, P] in float32; the first programs A, the others tokens.

    Padding, steps of 0, must leave a state as it is even where A is infinite.
    """
    i, blocks = tl.program_id(0), tl.cdiv(D, BX)
    if i < blocks:
        _turn(A_ND, A, i * BX + tl.arange(0, BX), D, D, 1, D, A_d, A_n, N, True)
    else:
        tiles = tl.cdiv(P, BX)
        o_t = (i - blocks) % tiles * BX + tl.arange(0, BX)
        i_b = ((i - blocks) // tiles).to(tl.int64)
        _turn(B_BNT + i_b * N * P, B + i_b * B_b, o_t, P, T, 1, P, B_t, B_n, N, False)
        _turn(C_BNT + i_b * N * P, C + i_b * C_b, o_t, P, T, 1, P, C_t, C_n, N, False)


@triton.jit(do_not_specialize=["D", "T", "P"])
def turn_bwd_kernel(
    sums, sum_A, carried, dB, dC, dA, dstate,
    T, D, N, P, S,
    BX: tl.constexpr,
):  # fmt: skip
    """Write gradients as the inputs lie, in their dtypes: dA [D, N], dstate [B, D, N], dB and dC [B, T, N].

    They are given as `sums` [B, 2, N, P], `sum_A` [N, D] and, of the first of S spans, `carried` [B, S, N, D].
    """
    i, blocks, tiles = tl.program_id(0), tl.cdiv(D, BX), tl.cdiv(T, BX)
    rows = (tl.num_programs(0) - blocks) // (blocks + tiles)
    if i < blocks * (rows + 1):
        o_d = i % blocks * BX + tl.arange(0, BX)
        if i < blocks:
            _turn(dA, sum_A, o_d, D, D, N, 1, 1, D, N, False)
        else:
            i_b = (i // blocks - 1).to(tl.int64)
            _turn(dstate + i_b * D * N, carried + i_b * S * N * D, o_d, D, D, N, 1, 1, D, N, False)
    else:
        j = i - blocks * (rows + 1)
        o_t, i_b = j % tiles * BX + tl.arange(0, BX), (j // tiles).to(tl.int64)
        _turn(dB + i_b * T * N, sums + 2 * i_b * N * P, o_t, T, T, N, 1, 1, P, N, False)
        _turn(dC + i_b * T * N, sums + (2 * i_b + 1) * N * P, o_t, T, T, N, 1, 1, P, N, False)


# The width D stays unspecialised: known to be a multiple of 16 it would make the loads wider, and with them spread
# a chunk's tokens over lanes, so that every scan would shuffle.
#
# What passes from chunk to chunk stays in memory, `carried`: the lane that writes it reads it again at the next chunk,
# so that no number of states is too large for the registers.


@triton.jit(do_not_specialize=["D"])
def walk_fwd_kernel(
    x, dt, A, W, C, ids, carried, y, states, total,
    T, D, N, M, span,
    BACK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Walk `span` tokens from the states in `carried` [B, spans, N, D], and leave there those after them.

    A program takes BN of the N states. On the way, each unless None: what these states add to the outputs
    y [N / BN, B, T, D], the states before each chunk, the sum of dt over the span.
    With BACK from the last token to the first, for the gradient of the state that a token receives: W = C, x the
    gradients of the outputs, no outputs.
    """
    groups = N // BN
    i_g = tl.program_id(0) % groups
    i_s, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    left = (T - i_s * span).to(tl.int32)
    o_row = tl.arange(0, BT)
    o_d = tl.program_id(0) // groups * BD + tl.arange(0, BD)
    m_d, m_first = o_d < D, (o_row == 0)[:, None]
    x += (i_b * T + i_s * span) * D
    dt += (i_b * T + i_s * span) * D
    carried += (i_b * tl.num_programs(1) + i_s) * N * D
    p_group = i_g * BN * D + o_d
    first, step, chunks = 0, BT, tl.cdiv(tl.minimum(span, left), BT)
    if BACK:
        first, step = (chunks - 1) * BT, -BT
    b_total = tl.zeros([BD], tl.float32)
    b_dt_next, b_x_next = _tokens(dt, first, left, o_row, o_d, D), _tokens(x, first, left, o_row, o_d, D)
    for _ in range(chunks):
        b_dt, b_u = b_dt_next.to(tl.float32), b_x_next.to(tl.float32)
        # The next chunk's numbers are on their way while this one computes.
        b_dt_next = _tokens(dt, first + step, left, o_row, o_d, D)
        b_x_next = _tokens(x, first + step, left, o_row, o_d, D)
        start = i_s * span + first
        b_span = tl.sum(b_dt, 0)
        if total is not None:
            b_total += b_span
        if ids is not None:
            b_new = _begins(ids, i_b, start, o_row, T)
            cut = tl.max(b_new.to(tl.int32), 0) > 0
        if not BACK:
            b_u = b_u * b_dt
        b_y = tl.zeros([BT, BD], tl.float32)
        b_h_next = tl.load(carried + p_group, mask=m_d, other=0.0)
        b_A_next = tl.load(A + p_group, mask=m_d, other=0.0)
        for n in range(BN):
            b_h, b_A = b_h_next, b_A_next
            m_next = m_d & (n + 1 < BN)
            b_h_next = tl.load(carried + p_group + (n + 1) * D, mask=m_next, other=0.0)
            b_A_next = tl.load(A + p_group + (n + 1) * D, mask=m_next, other=0.0)
            p_row = (i_b * N + i_g * BN + n) * M * BT + start + o_row
            # All loads come before the stores, which a compiler must take for stores to the same places.
            b_W = tl.load(W + p_row)
            if y is not None:
                b_C = tl.load(C + p_row)
            b_a = exp2(b_A[None, :] * b_dt, x.dtype.element_ty == tl.float32)
            if ids is not None:
                b_a = tl.where(b_new[:, None], 0.0, b_a)
            b_own = b_u * b_W[:, None]
            # What a chunk's tokens leave of themselves, and one power times the state before them: not a product of BT
            # decays, whose errors would add up along T.
            if BACK:
                # Last token first: Triton's own reversed scan would exchange everything between lanes.
                b_given = _chain(tl.flip(b_a, 0), tl.flip(b_a * b_own, 0))
            else:
                b_given = _chain(b_a, b_own)
            b_decay = _power(b_A * b_span)
            if ids is not None:
                b_decay = tl.where(cut, 0.0, b_decay)
            if y is not None:
                b_y += b_C[:, None] * _chain(b_a, tl.where(m_first, b_a * b_h[None, :] + b_own, b_own))
            if states is not None:
                tl.store(states + (i_b * M + start // BT) * N * D + p_group + n * D, b_h, mask=m_d)
            tl.store(carried + p_group + n * D, b_decay * b_h + _row(b_given, o_row, BT - 1), mask=m_d)
        if y is not None:
            p_y = ((i_g * tl.num_programs(2) + i_b) * T + i_s * span) * D
            _store_tokens(y + p_y, b_y, first, left, o_row, o_d, D)
        first += step
    if total is not None:
        tl.store(total + (i_b * tl.num_programs(1) + i_s) * D + o_d, b_total, mask=m_d)


@triton.jit(do_not_specialize=["D"])
def carry_fwd_kernel(
    added, total, A, ids, first, states,
    T, D, N, S, span,
    BACK: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Chain the S spans: the state before each, from what each adds; with BACK from the end, the state after each.

    `first` [B, N, D] is the state before all, nothing where it is None.
    """
    n, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_A = tl.load(A + n * D + o_d, mask=m_d, other=0.0)
    b_state = tl.zeros([BD], tl.float32)
    if first is not None:
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
def _halve(b_x, R: tl.constexpr, S: tl.constexpr, L: tl.constexpr):
    """Add halves of L lanes, [R, S, L] -> [R / 2, 2 S, L / 2]: half the lanes go on with the first half of the rows."""
    b_first, b_second = tl.split(tl.permute(tl.reshape(b_x, [2, R // 2, S, L]), [1, 2, 3, 0]))
    b_first = tl.reshape(b_first, [R // 2, S, 2, L // 2])
    b_second = tl.reshape(b_second, [R // 2, S, 2, L // 2])
    m_first = (tl.arange(0, 2) == 0)[None, None, :, None]
    b_x = tl.where(m_first, b_first, b_second) + tl.flip(tl.where(m_first, b_second, b_first), 2)
    return tl.reshape(b_x, [R // 2, 2 * S, L // 2])


@triton.jit
def _sums(b_x):
    """Sums of [16, 32] over the channels, twice: [16, 2].

    Where channels are lanes, an exchange serves two rows as long as each half of the lanes wants another one.
    """
    tl.static_assert(b_x.shape[0] == 16 and b_x.shape[1] == 32)
    b_x = _halve(tl.reshape(b_x, [16, 1, 32]), 16, 1, 32)
    b_x = _halve(_halve(_halve(b_x, 8, 2, 16), 4, 4, 8), 2, 8, 4)
    return tl.reshape(b_x + tl.flip(b_x, 2), [16, 2])


@triton.jit(do_not_specialize=["D"])
def scan_bwd_kernel(
    dy, x, dt, A, B, C, ids, states, carried, dA, dx, ddt, parts,
    T, D, N, M, span,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of `span` tokens, from the last chunk to the first, given the states before each.

    `carried` [B, spans, N, D] holds the gradients that the states after the span receive from later tokens, and then
    those of the states before it; dA [B, spans, N, D] in float64, in which long sums stay exact, and `parts`
    [blocks, B, 2, N, M BT], dB and dC of each block of channels, are filled.
    """
    i_d, i_s, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    left = (T - i_s * span).to(tl.int32)
    chunks = tl.cdiv(tl.minimum(span, left), BT)
    o_row = tl.arange(0, BT)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d, m_first = o_d < D, (o_row == 0)[:, None]
    # Of the two lanes that have the same sum the first one writes it.
    m_once = (tl.arange(0, 2) == 0)[None, :]
    # The compiler may remove the addition of -0.0, but not that of 0.0.
    b_one, b_none = tl.full([BT, BD], 1.0, tl.float32), tl.full([BT, BD], -0.0, tl.float32)
    p_tokens = (i_b * T + i_s * span) * D
    p_span = (i_b * tl.num_programs(1) + i_s) * N * D + o_d
    p_block = (i_d * tl.num_programs(2) + i_b) * 2 * N * M * BT + o_row[:, None] + tl.zeros([1, 2], tl.int64)
    for i in range(chunks):
        first = (chunks - 1 - i) * BT
        start = i_s * span + first
        b_dt = _tokens(dt + p_tokens, first, left, o_row, o_d, D).to(tl.float32)
        b_u = _tokens(x + p_tokens, first, left, o_row, o_d, D).to(tl.float32) * b_dt
        b_dy = _tokens(dy + p_tokens, first, left, o_row, o_d, D).to(tl.float32)
        b_span = tl.sum(b_dt, 0)
        b_du = tl.zeros([BT, BD], tl.float32)
        b_ddt = tl.zeros([BT, BD], tl.float32)
        if ids is not None:
            b_new = _begins(ids, i_b, start, o_row, T)
            cut = tl.max(b_new.to(tl.int32), 0) > 0
        p_state = (i_b * M + start // BT) * N * D + o_d
        p_part = p_block + start
        b_A_next = tl.load(A + o_d, mask=m_d, other=0.0)
        b_state_next = tl.load(states + p_state, mask=m_d, other=0.0)
        b_later_next = tl.load(carried + p_span, mask=m_d, other=0.0)
        b_dA_next = tl.load(dA + p_span, mask=m_d & (i > 0), other=0.0)
        for n in range(N):
            b_A, b_state, b_later, b_dA = b_A_next, b_state_next, b_later_next, b_dA_next
            # The next turn's numbers are on their way while this one computes.
            m_next = m_d & (n + 1 < N)
            b_A_next = tl.load(A + (n + 1) * D + o_d, mask=m_next, other=0.0)
            b_state_next = tl.load(states + p_state + (n + 1) * D, mask=m_next, other=0.0)
            b_later_next = tl.load(carried + p_span + (n + 1) * D, mask=m_next, other=0.0)
            b_dA_next = tl.load(dA + p_span + (n + 1) * D, mask=m_next & (i > 0), other=0.0)
            p_row = (i_b * N + n) * M * BT + start
            # As in a walk the loads come before the stores.
            b_B, b_C = tl.load(B + p_row + o_row), tl.load(C + p_row + o_row)
            b_a = exp2(b_A[None, :] * b_dt, x.dtype.element_ty == tl.float32)
            if ids is not None:
                b_a = tl.where(b_new[:, None], 0.0, b_a)
            b_own = b_u * b_B[:, None]
            b_own = tl.where(m_first, b_a * b_state[None, :] + b_own, b_own)
            b_before = tl.where(m_first, b_state[None, :], b_none)
            _, b_h, _, b_before = tl.associative_scan((b_a, b_own, b_one, b_before), 0, _join_before)
            # Last token first, as in a walk, which says also what a chunk leaves.
            b_a = tl.flip(b_a, 0)
            b_dh = tl.flip(b_C[:, None] * b_dy, 0)
            b_given = _chain(b_a, b_a * b_dh)
            b_decay = _power(b_A * b_span)
            if ids is not None:
                b_decay = tl.where(cut, 0.0, b_decay)
            tl.store(carried + p_span + n * D, b_decay * b_later + _row(b_given, o_row, BT - 1), mask=m_d)
            b_dh = tl.where(m_first, b_dh + b_later[None, :], b_dh)
            _, b_passed, _, b_dh = tl.associative_scan((b_a, b_a * b_dh, b_one, b_dh), 0, _join_before)
            b_dh, b_passed = tl.flip(b_dh, 0), tl.flip(b_passed, 0)
            b_rate = b_passed * b_before
            # Read again: there is no room to keep it.
            b_du += b_dh * tl.load(B + p_row + o_row)[:, None]
            b_ddt += b_rate * b_A[None, :]
            tl.store(dA + p_span + n * D, b_dA + tl.sum(b_rate * b_dt, 0).to(tl.float64), mask=m_d)
            tl.store(parts + p_part + n * M * BT, _sums(b_dh * b_u), mask=m_once)
            tl.store(parts + p_part + (N + n) * M * BT, _sums(b_h * b_dy), mask=m_once)
        b_x = _tokens(x + p_tokens, first, left, o_row, o_d, D).to(tl.float32)
        _store_tokens(dx + p_tokens, b_du * b_dt, first, left, o_row, o_d, D)
        _store_tokens(ddt + p_tokens, b_ddt * LN2 + b_du * b_x, first, left, o_row, o_d, D)
