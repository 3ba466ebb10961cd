"""The selective scan for the CPU, compiled by Numba: a row at a time, a state at a time, vectors along the channels.

Tensors, float32 and contiguous: x, dt, y [B, T, D]; B, C [B, T, N]; A [N, D] in units of log2, so that decays are
exp2(A dt); `begins` [B, T] says which tokens begin a segment; `kept` [B, M, N, D] are the states before each chunk. One
call works on the rows from `first_row` to `last_row`.

Rows of one chunk are a plain recurrence in float32. Over longer rows the rounding errors of the state and of decays
close to 1 add up. There a decay is scale + scale * rest: the first product, a power of two times the state, is exact,
and the rounding error of the sum with the second product is kept in `low` until the next token.
"""

import numpy as np

from basecap.ops.selective_scan.numba_kernels.kernels_parts import exact_sum, exp2, exp2_parts, inlined, kernel

ZERO = np.float32(0)


@inlined
def _read(x, dt, A, B, C, begins, row, n, start, count, h, y):
    """Go on with the states h [D] for `count` tokens and add what they give to y."""
    D = x.shape[2]
    for c in range(count):
        t = start + c
        begin = begins[row, t]
        enters, reads = B[row, t, n], C[row, t, n]
        for d in range(D):
            step = dt[row, t, d]
            left = ZERO if begin else exp2(step * A[n, d])
            h[d] = left * h[d] + enters * (step * x[row, t, d])
            y[row, t, d] += reads * h[d]


@inlined
def _read_long(x, dt, A, B, C, begins, row, n, start, count, h, low, y):
    """The same for a chunk of a longer row, whose states are the sums of h and `low` [D]."""
    D = x.shape[2]
    for c in range(count):
        t = start + c
        begin = begins[row, t]
        enters, reads = B[row, t, n], C[row, t, n]
        for d in range(D):
            step = dt[row, t, d]
            scale, rest = exp2_parts(step * A[n, d])
            scale = ZERO if begin else scale
            rest = ZERO if begin else rest
            left = scale * h[d]
            more = rest * left + enters * (step * x[row, t, d]) + scale * low[d]
            # What is lost of low's own decay is a rounding of a rounding.
            after, low[d] = exact_sum(left, more)
            h[d] = after
            y[row, t, d] += reads * after


@kernel
def scan_fwd_kernel(x, dt, A, B, C, begins, state, y, kept, chunk, first_row, last_row):
    """Add the outputs to y, leave the last state in `state` [B, N, D], and the states between chunks in `kept`.

    A `kept` of no chunks keeps nothing.
    """
    T, D = x.shape[1:]
    N = A.shape[0]
    h, low = np.empty(D, np.float32), np.empty(D, np.float32)
    for row in range(first_row, last_row):
        for start in range(0, T, chunk):
            count = min(T, start + chunk) - start
            for n in range(N):
                for d in range(D):
                    h[d] = state[row, n, d]
                    low[d] = ZERO if count == T else state[row, n, d] - h[d]
                if kept.shape[1] > 0:
                    for d in range(D):
                        kept[row, start // chunk, n, d] = h[d]
                # A start that is known lets the compiler see that no index is negative.
                if count == T:
                    _read(x, dt, A, B, C, begins, row, n, 0, count, h, y)
                else:
                    _read_long(x, dt, A, B, C, begins, row, n, start, count, h, low, y)
                for d in range(D):
                    state[row, n, d] = np.float64(h[d]) + low[d]


@inlined
def _history(x, dt, A, B, begins, row, n, start, count, decay, h):
    """Compute the decays [C, D] of state `n` and the states [C + 1, D] after h[0] again, for `count` tokens."""
    D = x.shape[2]
    for c in range(count):
        t = start + c
        begin = begins[row, t]
        enters = B[row, t, n]
        for d in range(D):
            step = dt[row, t, d]
            left = ZERO if begin else exp2(step * A[n, d])
            decay[c, d] = left
            h[c + 1, d] = left * h[c, d] + enters * (step * x[row, t, d])


@inlined
def _history_long(x, dt, A, B, begins, row, n, start, count, scale, rest, h):
    """The same for a chunk of a longer row, with decays in two parts [C, D]."""
    D = x.shape[2]
    for c in range(count):
        t = start + c
        begin = begins[row, t]
        enters = B[row, t, n]
        for d in range(D):
            step = dt[row, t, d]
            power, more = exp2_parts(step * A[n, d])
            power = ZERO if begin else power
            more = ZERO if begin else more
            scale[c, d], rest[c, d] = power, more
            h[c + 1, d] = (power + power * more) * h[c, d] + enters * (step * x[row, t, d])


@inlined
def _return(dy, x, dt, A, B, C, row, n, start, count, decay, h, g, rates, du, ddt, dB, dC):
    """Go back over these tokens with g [D], the gradient of the state. What they give to dA is added to `rates` [D]."""
    D = x.shape[2]
    for c in range(count - 1, -1, -1):
        t = start + c
        enters, reads = B[row, t, n], C[row, t, n]
        entered, read = ZERO, ZERO
        for d in range(D):
            after = g[d] + reads * dy[row, t, d]
            g[d] = after
            read += dy[row, t, d] * h[c + 1, d]
            entered += dt[row, t, d] * x[row, t, d] * after
            du[row, t, d] += enters * after
        for d in range(D):
            before = g[d] * decay[c, d]
            g[d] = before
            exponent = before * h[c, d]
            ddt[row, t, d] += exponent * A[n, d]
            rates[d] += exponent * dt[row, t, d]
        dB[row, t, n] = entered
        dC[row, t, n] = read


@inlined
def _return_long(dy, x, dt, A, B, C, row, n, start, count, scale, rest, h, g, low, rates, du, ddt, dB, dC):
    """The same for a chunk of a longer row, where the gradient of the state is the sum of g and `low` [D]."""
    D = x.shape[2]
    for c in range(count - 1, -1, -1):
        t = start + c
        enters, reads = B[row, t, n], C[row, t, n]
        entered, read = ZERO, ZERO
        for d in range(D):
            after, lost = exact_sum(g[d], low[d] + reads * dy[row, t, d])
            before = scale[c, d] * after
            g[d] = before
            low[d] = rest[c, d] * before + scale[c, d] * lost
            read += dy[row, t, d] * h[c + 1, d]
            entered += dt[row, t, d] * x[row, t, d] * after
            du[row, t, d] += enters * after
        for d in range(D):
            exponent = (g[d] + low[d]) * h[c, d]
            ddt[row, t, d] += exponent * A[n, d]
            rates[d] += exponent * dt[row, t, d]
        dB[row, t, n] = entered
        dC[row, t, n] = read


@kernel
def scan_bwd_kernel(
    dy, x, dt, A, B, C, begins, kept, dstate, du, ddt, dA, dB, dC, chunk, first_row, last_row
):  # fmt: skip
    """Add to du [B, T, D], the gradient of u = dt x, to the exponents' part of ddt and to dA [B, N, D]; fill dB, dC.

    `dstate` [B, N, D] is the gradient of the last state and becomes that of the first.
    """
    T, D = x.shape[1:]
    N = A.shape[0]
    decay, rest = np.empty((chunk, D), np.float32), np.empty((chunk, D), np.float32)
    h, g, low = np.empty((chunk + 1, D), np.float32), np.empty(D, np.float32), np.empty(D, np.float32)
    # A chunk's part of dA is a sum of its own, so that roundings do not add up.
    rates = np.empty(D, np.float32)
    for row in range(first_row, last_row):
        for m in range(kept.shape[1] - 1, -1, -1):
            start = m * chunk
            count = min(T, start + chunk) - start
            for n in range(N):
                for d in range(D):
                    h[0, d] = kept[row, m, n, d]
                    g[d], rates[d] = dstate[row, n, d], ZERO
                    low[d] = ZERO if count == T else dstate[row, n, d] - g[d]
                if count == T:
                    _history(x, dt, A, B, begins, row, n, 0, count, decay, h)
                    _return(dy, x, dt, A, B, C, row, n, 0, count, decay, h, g, rates, du, ddt, dB, dC)
                else:
                    _history_long(x, dt, A, B, begins, row, n, start, count, decay, rest, h)
                    _return_long(
                        dy, x, dt, A, B, C, row, n, start, count, decay, rest, h, g, low, rates, du, ddt, dB, dC
                    )
                for d in range(D):
                    dstate[row, n, d] = np.float64(g[d]) + low[d]
                    dA[row, n, d] += rates[d]
