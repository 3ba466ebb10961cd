"""The long convolution in Triton: products with Toeplitz matrices, a channel at a time; see README.md.

Tensors, contiguous: u, y, du, dy [B, D, T]; taps [D, L] in two parts; the second may be None. Time is cut into
M blocks of BT tokens; a column is one block of one row, column c the block c // B of row c % B, and holds its tokens.
"""

import triton
import triton.language as tl

from basecap.ops.kernels_shared import add_product


@triton.jit
def transpose_kernel(x, y, R, C, x_batch, x_row, BR: tl.constexpr, BC: tl.constexpr):
    """Fill y [B, C, R] with x [B, R, C] transposed, whose rows are `x_row` numbers apart."""
    i_b = tl.program_id(2).to(tl.int64)
    o_r, o_c = tl.program_id(1) * BR + tl.arange(0, BR), tl.program_id(0) * BC + tl.arange(0, BC)
    m_r, m_c = o_r < R, o_c < C
    p_x = i_b * x_batch + o_r.to(tl.int64)[:, None] * x_row + o_c[None, :]
    b_x = tl.load(x + p_x, mask=m_r[:, None] & m_c[None, :])
    p_y = (i_b * C + o_c[:, None]) * R + o_r[None, :]
    tl.store(y + p_y, tl.trans(b_x), mask=m_c[:, None] & m_r[None, :])


@triton.jit
def _block(x, i_d, o_c, o_t, k, B, T, D, columns):
    """The tokens [columns, BT] of the blocks `k` after these columns', zeros outside the sequence."""
    b_t = (o_c // B + k)[:, None] * o_t.shape[0] + o_t[None, :]
    p_row = ((o_c % B).to(tl.int64) * D + i_d) * T
    m = (o_c < columns)[:, None] & (b_t >= 0) & (b_t < T)
    return tl.load(x + p_row[:, None] + b_t, mask=m, other=0.0)


@triton.jit
def long_convolution_kernel(
    x, high, low, y,
    B, T, D, L, columns,
    BACK: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Fill y with the convolution of x; with BACK with the gradient of its input, x being that of its output."""
    # Columns of late blocks have the most to do.
    i_c, i_d = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    o_c, o_t = i_c * BC + tl.arange(0, BC), tl.arange(0, BT)
    high += i_d.to(tl.int64) * L
    if low is not None:
        low += i_d.to(tl.int64) * L
    # From this lag on, no tap is left, or no token.
    lags = tl.cdiv(L - 1, BT) + 1
    if BACK:
        lags = tl.minimum(lags, tl.cdiv(T, BT) - i_c * BC // B)
    else:
        lags = tl.minimum(lags, (tl.minimum(i_c * BC + BC, columns) - 1) // B + 1)
    b_y = tl.zeros([BC, BT], tl.float32)
    for k in range(lags):
        # Rows: the tokens of x; columns: those of y.
        b_x = _block(x, i_d, o_c, o_t, k if BACK else -k, B, T, D, columns)
        sign = -1 if BACK else 1
        b_tap = k * BT + sign * (o_t[None, :] - o_t[:, None])
        m_tap = (b_tap >= 0) & (b_tap < L)
        b_y = add_product(b_y, b_x, tl.load(high + b_tap, mask=m_tap, other=0.0), "ieee")
        if low is not None:
            b_y = add_product(b_y, b_x, tl.load(low + b_tap, mask=m_tap, other=0.0), "ieee")
    b_t = (o_c // B)[:, None] * BT + o_t[None, :]
    p_row = ((o_c % B).to(tl.int64) * D + i_d) * T
    m = (o_c < columns)[:, None] & (b_t < T)
    tl.store(y + p_row[:, None] + b_t, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit
def long_convolution_taps_kernel(
    x, dy, parts,
    B, T, D, columns,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Fill parts [D, lags, 2 BT]: what the blocks `k` apart give to the taps k BT - BT + 1, ..., k BT + BT."""
    k, i_d = tl.program_id(0), tl.program_id(1)
    o_t = tl.arange(0, BT)
    b_sums = tl.zeros([BT, BT], tl.float32)
    for start in range(k * B, columns, BC):
        o_c = start + tl.arange(0, BC)
        b_x = _block(x, i_d, o_c, o_t, -k, B, T, D, columns)
        b_dy = _block(dy, i_d, o_c, o_t, 0, B, T, D, columns)
        b_sums = add_product(b_sums, tl.trans(b_dy), b_x, "ieee")
    # Row i, column j belong to the tap k BT + i - j: diagonals become columns, and these are added up.
    o_p = tl.arange(0, 2 * BT)
    b_j = o_t[:, None] + BT - 1 - o_p[None, :]
    valid = (b_j >= 0) & (b_j < BT)
    b_moved = tl.gather(b_sums, tl.where(valid, b_j, 0), 1)
    b_part = tl.sum(tl.where(valid, b_moved, 0.0), 0)
    tl.store(parts + (i_d.to(tl.int64) * tl.num_programs(0) + k) * 2 * BT + o_p, b_part)
