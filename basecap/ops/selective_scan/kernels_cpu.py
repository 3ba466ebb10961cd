"""The selective scan for the CPU, compiled by Numba: a row at a time, a state at a time, vectors along the channels.

Tensors, float32 and contiguous: x, dt, y [B, T, D]; B, C [B, T, N]; A [N, D] in units of log2, so that decays are
exp2(A dt); `begins` [B, T] says which tokens begin a segment; `kept` [B, M, N, D] are the states before each chunk. One
call works on the rows from `first_row` to `last_row`. What is carried from chunk to chunk is float64.
"""

import numpy as np

from basecap.ops.kernels_shared_cpu import exp2, exp2_times, inlined, kernel

ZERO = np.float32(0)


@inlined
def _whole(dt, begins, row, start, count, steps):
    """Fill `steps` [D] with the sum of these tokens' step sizes; return whether none of them begins a segment."""
    D = dt.shape[2]
    for d in range(D):
        steps[d] = ZERO
    open_ = True
    for c in range(count):
        open_ = open_ and not begins[row, start + c]
        for d in range(D):
            steps[d] += dt[row, start + c, d]
    return open_


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
def _read_beside(x, dt, A, B, C, begins, row, n, start, count, h, fade, y):
    """The same where the states are the sums of h and `fade` [D], what is left of those before these tokens."""
    D = x.shape[2]
    for c in range(count):
        t = start + c
        begin = begins[row, t]
        enters, reads = B[row, t, n], C[row, t, n]
        for d in range(D):
            step = dt[row, t, d]
            left = ZERO if begin else exp2(step * A[n, d])
            h[d] = left * h[d] + enters * (step * x[row, t, d])
            fade[d] = ZERO if begin else left * fade[d]
            y[row, t, d] += reads * (h[d] + fade[d])


@kernel
def scan_fwd_kernel(x, dt, A, B, C, begins, state, y, kept, chunk, first_row, last_row):
    """Add the outputs to y, leave the last state in `state` [B, N, D], and the states between chunks in `kept`.

    A `kept` of no chunks keeps nothing. A later chunk starts from nothing, and the state before it, times the decays,
    is added to its outputs: along T, little is rounded then.
    """
    T, D = x.shape[1:]
    N = A.shape[0]
    h, fade, steps = np.empty(D, np.float32), np.empty(D, np.float32), np.empty(D, np.float32)
    for row in range(first_row, last_row):
        for start in range(0, T, chunk):
            count = min(T, start + chunk) - start
            whole = start > 0 and _whole(dt, begins, row, start, count, steps)
            for n in range(N):
                for d in range(D):
                    h[d] = ZERO if start > 0 else state[row, n, d]
                    fade[d] = state[row, n, d]
                if kept.shape[1] > 0:
                    for d in range(D):
                        kept[row, start // chunk, n, d] = fade[d]
                if start == 0:
                    _read(x, dt, A, B, C, begins, row, n, start, count, h, y)
                else:
                    _read_beside(x, dt, A, B, C, begins, row, n, start, count, h, fade, y)
                for d in range(D):
                    before = exp2_times(steps[d] * A[n, d], state[row, n, d]) if whole else 0.0
                    state[row, n, d] = h[d] + before


@inlined
def _history(x, dt, A, B, begins, row, n, start, count, decay, h):
    """Compute the decays [C, D] of state `n` and the states [C + 1, D] after h[0] anew, for `count` tokens."""
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
def _return_beside(dy, x, dt, A, B, C, row, n, start, count, decay, h, g, own, fade, rates, du, ddt, dB, dC):
    """The same with g's two parts: `own`, that comes from these tokens, and `fade`, from those after them."""
    D = x.shape[2]
    for c in range(count - 1, -1, -1):
        t = start + c
        enters, reads = B[row, t, n], C[row, t, n]
        entered, read = ZERO, ZERO
        for d in range(D):
            # Not the sum of the rounded parts, which may cancel.
            after = own[d] + fade[d] + reads * dy[row, t, d]
            g[d] = after
            own[d] += reads * dy[row, t, d]
            read += dy[row, t, d] * h[c + 1, d]
            entered += dt[row, t, d] * x[row, t, d] * after
            du[row, t, d] += enters * after
        for d in range(D):
            own[d] *= decay[c, d]
            fade[d] *= decay[c, d]
            exponent = g[d] * decay[c, d] * h[c, d]
            ddt[row, t, d] += exponent * A[n, d]
            rates[d] += exponent * dt[row, t, d]
        dB[row, t, n] = entered
        dC[row, t, n] = read


@kernel
def scan_bwd_kernel(
    dy, x, dt, A, B, C, begins, kept, dstate, du, ddt, dA, dB, dC, chunk, first_row, last_row
):  # fmt: skip
    """Add to du [B, T, D], the gradient of u = dt x, to the exponents' part of ddt and to dA [B, N, D]; fill dB, dC.

    `dstate` [B, N, D] is the gradient of the last state and becomes that of the first; see `scan_fwd_kernel` for why
    what comes from later chunks goes apart.
    """
    T, D = x.shape[1:]
    N = A.shape[0]
    decay, h = np.empty((chunk, D), np.float32), np.empty((chunk + 1, D), np.float32)
    # A chunk's part of dA is a sum of its own, likewise.
    g, own, fade = np.empty(D, np.float32), np.empty(D, np.float32), np.empty(D, np.float32)
    rates, steps = np.empty(D, np.float32), np.empty(D, np.float32)
    for row in range(first_row, last_row):
        for m in range(kept.shape[1] - 1, -1, -1):
            start = m * chunk
            count = min(T, start + chunk) - start
            last = m == kept.shape[1] - 1
            whole = not last and _whole(dt, begins, row, start, count, steps)
            for n in range(N):
                for d in range(D):
                    h[0, d] = kept[row, m, n, d]
                    own[d] = dstate[row, n, d] if last else ZERO
                    fade[d], rates[d] = dstate[row, n, d], ZERO
                _history(x, dt, A, B, begins, row, n, start, count, decay, h)
                if last:
                    _return(dy, x, dt, A, B, C, row, n, start, count, decay, h, own, rates, du, ddt, dB, dC)
                else:
                    _return_beside(
                        dy, x, dt, A, B, C, row, n, start, count, decay, h, g, own, fade, rates, du, ddt, dB, dC
                    )
                for d in range(D):
                    later = exp2_times(steps[d] * A[n, d], dstate[row, n, d]) if whole else 0.0
                    dstate[row, n, d] = own[d] + later
                    dA[row, n, d] += rates[d]
