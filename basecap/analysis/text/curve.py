"""A smooth curve through the evaluation points of one run: local linear regression."""

import numpy as np
from numpy import ndarray

#: Points that the kernel reaches at every place, however narrow its bandwidth is.
NEAREST = 4
#: By this share the kernel reaches beyond the last of them, which would have no weight at its edge.
MARGIN = 1e-3
#: Numbers in the arrays of one block of curves: larger arrays do not fit into a processor's cache, and take longer.
BLOCK = 100_000


def fitted(x: ndarray, y: ndarray, at: ndarray, bandwidth: float) -> ndarray:
    """Return the values that local linear regression reads off curves at places, many curves at once.

    At each place a line is fitted to the points around it, weighted by the tricube of their distance over the
    bandwidth (Cleveland, JASA 74, 1979; Fan, Ann. Statist. 21, 1993). A place just beyond the last point is read off
    the line that ends there. The bandwidth grows where it would reach fewer than four points.

    Args:
        x: [R, K] abscissae of K points in any order.
        y: [D, R, K] their ordinates on D curves.
        at: [G] places.
        bandwidth: positive.

    Returns:
        [R, G, D], exact where the points lie on a line.
    """
    middle = at.mean()
    x, at = (x - middle) / bandwidth, (at - middle) / bandwidth
    low, high, edge = at.min(), at.max(), 1 / (1 + MARGIN)
    few = np.count_nonzero((x > high - edge) & (x < low + edge), axis=1) < NEAREST
    if not few.any():
        reached = np.flatnonzero(((x > low - 1) & (x < high + 1)).any(0))
        kept = slice(reached[0], reached[-1] + 1)
        x, y = np.ascontiguousarray(x[:, kept]), y[..., kept]
    rows = max(1, BLOCK // (len(at) * x.shape[1]))
    values = np.empty((len(y), len(at), len(x)))
    arrays = np.empty((2, len(at), min(rows, len(x)), x.shape[1]))  # once: new memory takes longer than the arithmetic
    for first in range(0, len(x), rows):
        block = slice(first, first + rows)
        own = arrays[:, :, : len(x[block])]
        values[..., block] = _fitted(x[block], y[:, block], at, few[block].any(), own)
    return values.transpose(2, 1, 0)


def smoother(x: ndarray, at: ndarray, bandwidth: float) -> ndarray:
    """Return the weights of the points of one curve in `fitted`, [G, K]: its values are weights @ y."""
    return fitted(x[None], np.eye(len(x))[:, None], at, bandwidth)[0]


def _fitted(x: ndarray, y: ndarray, at: ndarray, few: bool, arrays: ndarray) -> ndarray:
    """Fit curves whose bandwidth is 1, grown where it reaches `few` points; return their values, [D, G, R].

    Two `arrays` [G, R, K] are overwritten.
    """
    kernel, scratch = arrays
    count = len(y)
    columns = np.empty((3 + 2 * count, *x.shape))
    columns[0] = 1
    columns[1] = x
    np.multiply(x, x, out=columns[2])
    columns[3 : 3 + count] = y
    np.multiply(y, x, out=columns[3 + count :])
    np.subtract(x, at[:, None, None], out=kernel)
    np.abs(kernel, out=kernel)
    reach = _reach(kernel) if few else None
    if reach is not None:
        kernel /= reach[..., None]
    np.multiply(kernel, kernel, out=scratch)
    kernel *= scratch
    np.clip(kernel, 0, 1, out=kernel)  # takes a third of the time of a maximum with a number
    np.subtract(1, kernel, out=kernel)
    np.multiply(kernel, kernel, out=scratch)
    kernel *= scratch
    sums = np.ascontiguousarray((columns.swapaxes(0, 1) @ kernel.transpose(1, 2, 0)).transpose(1, 2, 0))  # [., G, R]
    return _read_off(sums, at[:, None], 1.0 if reach is None else reach)


def _read_off(sums: ndarray, at: ndarray, reach: ndarray | float) -> ndarray:
    """Return the values of lines at places [G, 1], fitted by sums over weighted points of 1, x, x * x, y and x * y."""
    count = len(sums[3:]) // 2
    zeroth, mean = sums[0], sums[3 : 3 + count]
    first = sums[1] - at * zeroth  # of distances to the place
    second = sums[2] - at * (sums[1] + first)
    line = sums[3 + count :] - at * mean
    spread = zeroth * second - first**2
    flat = spread <= 1e-12 * zeroth**2 * reach**2
    if not flat.any():
        return (second * mean - first * line) / spread
    # Points of one abscissa have a mean, no slope.
    return np.where(flat, mean / zeroth, (second * mean - first * line) / np.where(flat, 1.0, spread))


def _reach(distance: ndarray) -> ndarray:
    """Return the bandwidth at each place, [G, R], wide enough for the nearest points; distances are [G, R, K]."""
    reach = np.ones(distance.shape[:2])
    nearest = min(NEAREST, distance.shape[2])
    few = np.count_nonzero(distance < 1 / (1 + MARGIN), axis=-1) < nearest
    if few.any():  # finding the nearest points takes as long as all the rest
        farthest = np.partition(distance[few], nearest - 1, axis=-1)[:, nearest - 1]
        reach[few] = np.maximum(1.0, farthest * (1 + MARGIN))
    return reach
