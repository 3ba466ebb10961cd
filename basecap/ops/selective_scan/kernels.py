"""The selective scan in Triton: chunks of BT tokens in parallel, a block of BD channels each; see README.md.

Tensors: x, dt, y [B, T, D]; B, C [B, N, T] in float32, so that a chunk's tokens lie together; states between chunks
[B, M, N, D]; all contiguous. A [N, D] is in units of log2: decays are exp2(A dt).
`ids` are the segments [B, T], read only where PACKED. Past the end of a sequence dt, x and dy are zero, which leaves
every state as it is.
"""

import triton
import triton.language as tl

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
def _add(left, right):
    return left + right


# The width D stays unspecialised: known to be a multiple of 16 it would make the loads wider, and with them spread
# a chunk's tokens over lanes, so that every scan would shuffle.


@triton.jit(do_not_specialize=["D"])
def chunk_fwd_kernel(
    x, dt, A, W, ids, out, total,
    T, D, N, M,
    BACK: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the state at its end (W = B, x the inputs), as if it began with none.

    With BACK: what it adds to the gradient of the state at its start (W = C, x the gradients of the outputs).
    """
    i_m, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    end = tl.minimum((i_m + 1) * BT, T)
    o_first = i_m * BT + tl.arange(0, BT)
    o_t = o_first
    if not BACK:
        # Last token first: Triton's own reversed scan would exchange everything between lanes.
        o_t = (i_m + 1) * BT - 1 - tl.arange(0, BT)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_t, m_d = o_t < T, o_d < D
    m = m_t[:, None] & m_d[None, :]
    p = (i_b * T + o_t)[:, None] * D + o_d[None, :]
    b_dt = tl.load(dt + p, mask=m, other=0.0).to(tl.float32)
    b_x = tl.load(x + p, mask=m, other=0.0).to(tl.float32)
    if BACK:
        b_elapsed = tl.associative_scan(b_dt, 0, _add)
        o_edge = tl.maximum(i_m * BT - 1, 0)
    else:
        # Sums over later tokens, without the cancellation in total minus earlier ones.
        b_next = tl.load(dt + p + D, mask=(o_t + 1 < end)[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_elapsed = tl.associative_scan(b_next, 0, _add)
        o_edge = end - 1
        b_x = b_x * b_dt
        tl.store(total + (i_b * M + i_m) * D + o_d, tl.sum(b_dt, 0), mask=m_d)
    if PACKED:
        b_ids = tl.load(ids + i_b * T + o_t, mask=m_t, other=0)
        b_edge = tl.load(ids + i_b * T + o_edge)
        b_x = tl.where((b_ids == b_edge)[:, None], b_x, 0.0)
    p_state = (i_b * M + i_m) * N * D + o_d
    for n in range(N):
        b_A = tl.load(A + n * D + o_d, mask=m_d, other=0.0)
        b_W = tl.load(W + (i_b * N + n) * T + o_first, mask=o_first < T, other=0.0)
        if not BACK:
            b_W = tl.flip(b_W, 0)
        b_added = tl.sum(tl.exp2(b_A[None, :] * b_elapsed) * b_x * b_W[:, None], 0)
        tl.store(out + p_state + n * D, b_added, mask=m_d)


@triton.jit(do_not_specialize=["D"])
def carry_fwd_kernel(
    added, total, A, ids, first, states, last,
    T, D, N, M,
    BACK: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Chain the chunks: the state before each, from what each adds; with BACK from the end, the state after each."""
    n, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_A = tl.load(A + n * D + o_d, mask=m_d, other=0.0)
    b_state = tl.load(first + (i_b * N + n) * D + o_d, mask=m_d, other=0.0)
    b_one, b_none = tl.full([BM, BD], 1.0, tl.float32), tl.zeros([BM, BD], tl.float32)
    # BM chunks at a time, so that their loads are in flight together.
    for i in range(0, M, BM):
        o_m = i + tl.arange(0, BM)
        if BACK:
            o_m = M - 1 - o_m
        m_m = (o_m >= 0) & (o_m < M)
        m = m_m[:, None] & m_d[None, :]
        o_row = i_b * M + o_m
        p = (o_row * N + n)[:, None] * D + o_d[None, :]
        b_added = tl.load(added + p, mask=m, other=0.0)
        b_total = tl.load(total + o_row[:, None] * D + o_d[None, :], mask=m, other=0.0)
        b_decay = tl.exp2(b_A[None, :] * b_total)
        if PACKED:
            b_before = tl.load(ids + i_b * T + tl.maximum(o_m * BT - 1, 0), mask=m_m, other=0)
            b_after = tl.load(ids + i_b * T + tl.minimum((o_m + 1) * BT, T) - 1, mask=m_m, other=0)
            b_decay = tl.where((b_before == b_after)[:, None], b_decay, 0.0)
        b_decay, b_own, b_before_decay, b_before_own = tl.associative_scan(
            (b_decay, b_added, b_one, b_none), 0, _join_before
        )
        tl.store(states + p, b_before_decay * b_state[None, :] + b_before_own, mask=m)
        m_last = (tl.arange(0, BM) == BM - 1)[:, None]
        b_state = tl.sum(tl.where(m_last, b_decay * b_state[None, :] + b_own, 0.0), 0)
    tl.store(last + (i_b * N + n) * D + o_d, b_state, mask=m_d)


@triton.jit(do_not_specialize=["D"])
def output_fwd_kernel(
    x, dt, A, B, C, ids, states, y,
    T, D, N, M,
    PACKED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk, from the state before it."""
    i_m, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = i_m * BT + tl.arange(0, BT)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_t, m_d = o_t < T, o_d < D
    m = m_t[:, None] & m_d[None, :]
    p = (i_b * T + o_t)[:, None] * D + o_d[None, :]
    b_dt = tl.load(dt + p, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(x + p, mask=m, other=0.0).to(tl.float32) * b_dt
    b_y = tl.zeros([BT, BD], tl.float32)
    p_row = i_b * N * T + o_t
    p_state = (i_b * M + i_m) * N * D + o_d
    if PACKED:
        b_ids = tl.load(ids + i_b * T + o_t, mask=m_t, other=0)
        b_new = b_ids != tl.load(ids + i_b * T + tl.maximum(o_t - 1, 0), mask=m_t, other=0)
    for n in range(N):
        b_A = tl.load(A + n * D + o_d, mask=m_d, other=0.0)
        b_B = tl.load(B + p_row + n * T, mask=m_t, other=0.0)
        b_C = tl.load(C + p_row + n * T, mask=m_t, other=0.0)
        b_state = tl.load(states + p_state + n * D, mask=m_d, other=0.0)
        b_a = tl.exp2(b_A[None, :] * b_dt)
        if PACKED:
            b_a = tl.where(b_new[:, None], 0.0, b_a)
        b_decay, b_own = tl.associative_scan((b_a, b_u * b_B[:, None]), 0, _join)
        b_y += b_C[:, None] * (b_decay * b_state[None, :] + b_own)
    tl.store(y + p, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["D"])
def scan_bwd_kernel(
    dy, x, dt, A, B, C, ids, states, later, dx, ddt, dB, dC,
    T, D, N, M, rows,
    PACKED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk, from the state before it and the gradient of the state after it (`later`).

    dB and dC receive one part per block of channels, [blocks, B, N, T] with `rows` = B T; what a chunk contributes to
    dA takes the place of the state in `states`, which nobody else reads.
    """
    i_d, i_m, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = i_m * BT + tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    m_t, m_d = o_t < T, o_d < D
    m = m_t[:, None] & m_d[None, :]
    p = (i_b * T + o_t)[:, None] * D + o_d[None, :]
    b_dt = tl.load(dt + p, mask=m, other=0.0).to(tl.float32)
    b_x = tl.load(x + p, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + p, mask=m, other=0.0).to(tl.float32)
    # Tokens from the last to the first, each with the step size of the token after it.
    o_back = (i_m + 1) * BT - 1 - tl.arange(0, BT)
    m_next = o_back + 1 < tl.minimum((i_m + 1) * BT, T)
    p_back = (i_b * T + o_back)[:, None] * D + o_d[None, :]
    b_next = tl.load(dt + p_back + D, mask=m_next[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_dy_back = tl.load(dy + p_back, mask=(o_back < T)[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_du = tl.zeros([BT, BD], tl.float32)
    b_ddt = tl.zeros([BT, BD], tl.float32)
    b_one, b_none = tl.full([BT, BD], 1.0, tl.float32), tl.zeros([BT, BD], tl.float32)
    p_row = i_b * N * T + o_t
    p_state = (i_b * M + i_m) * N * D + o_d
    if PACKED:
        b_ids = tl.load(ids + i_b * T + o_t, mask=m_t, other=0)
        b_new = b_ids != tl.load(ids + i_b * T + tl.maximum(o_t - 1, 0), mask=m_t, other=0)
        b_ids = tl.load(ids + i_b * T + o_back, mask=m_next, other=0)
        b_new_next = b_ids != tl.load(ids + i_b * T + o_back + 1, mask=m_next, other=0)
    for n in range(N):
        b_A = tl.load(A + n * D + o_d, mask=m_d, other=0.0)
        b_B = tl.load(B + p_row + n * T, mask=m_t, other=0.0)
        b_C = tl.flip(tl.load(C + p_row + n * T, mask=m_t, other=0.0), 0)
        b_state = tl.load(states + p_state + n * D, mask=m_d, other=0.0)
        b_later = tl.load(later + p_state + n * D, mask=m_d, other=0.0)
        b_a = tl.exp2(b_A[None, :] * b_dt)
        if PACKED:
            b_a = tl.where(b_new[:, None], 0.0, b_a)
        b_b = b_x * b_dt * b_B[:, None]
        _, _, b_decay, b_own = tl.associative_scan((b_a, b_b, b_one, b_none), 0, _join_before)
        # The decayed previous state: h minus what the token adds would cancel where decays are strong.
        b_kept = b_a * (b_decay * b_state[None, :] + b_own)
        b_a = tl.exp2(b_A[None, :] * b_next)
        if PACKED:
            b_a = tl.where(b_new_next[:, None], 0.0, b_a)
        b_decay, b_own = tl.associative_scan((b_a, b_dy_back * b_C[:, None]), 0, _join)
        b_dh = tl.flip(b_own + b_decay * b_later[None, :], 0)
        b_rate = b_dh * b_kept
        b_du += b_dh * b_B[:, None]
        b_ddt += b_rate * b_A[None, :]
        tl.store(states + p_state + n * D, tl.sum(b_rate * b_dt, 0), mask=m_d)
        p_part = i_d * rows * N + p_row + n * T
        tl.store(dB + p_part, tl.sum(b_dh * b_x * b_dt, 1), mask=m_t)
        tl.store(dC + p_part, tl.sum((b_kept + b_b) * b_dy, 1), mask=m_t)
    tl.store(dx + p, (b_du * b_dt).to(dx.dtype.element_ty), mask=m)
    tl.store(ddt + p, (b_ddt * LN2 + b_du * b_x).to(ddt.dtype.element_ty), mask=m)
