"""Shared by the chunked Triton kernels: addresses of the rows, states and matrices of a chunk."""

import triton
import triton.language as tl


@triton.jit
def rows(base, i_b, o_t, T, i_h, H, o_x, X):
    """Addresses and mask of the rows `o_t`, columns `o_x`, of one head of a [B, T, H, X] tensor."""
    p = base + ((i_b * T + o_t)[:, None] * H + i_h) * X + o_x[None, :]
    return p, (o_t < T)[:, None] & (o_x < X)[None, :]


@triton.jit
def state(base, i_b, i_m, i_h, M, H, o_k, K, o_v, V):
    """Addresses and mask of a block of the state [K, V] of one chunk and head."""
    p = base + ((i_b * M + i_m) * H + i_h) * K * V + o_k[:, None] * V + o_v[None, :]
    return p, (o_k < K)[:, None] & (o_v < V)[None, :]


@triton.jit
def numbered_state(base, i, K, V, o_k, o_v):
    """Addresses and mask of a block of state number `i`."""
    p = base + i * K * V + (o_k[:, None] * V + o_v[None, :])
    return p, (o_k < K)[:, None] & (o_v < V)[None, :]


@triton.jit
def matrix(base, i_b, i_m, i_h, M, H, BT: tl.constexpr, TURNED: tl.constexpr = False):
    """Addresses of the [BT, BT] matrix of one chunk and head; TURNED: of its transpose."""
    o = tl.arange(0, BT)
    o_row, o_column = o[:, None], o[None, :]
    if TURNED:
        o_row, o_column = o_column, o_row
    return base + ((i_b * M + i_m) * H + i_h) * BT * BT + o_row * BT + o_column
