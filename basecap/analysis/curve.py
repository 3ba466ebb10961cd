"""A smooth curve through the evaluation points of one run: local linear regression."""

import numpy as np
from numpy import ndarray

#: Points that the kernel reaches at every place, however narrow its bandwidth is.
NEAREST = 4
#: By this share the kernel reaches beyond the last of them, which would have no weight at its edge.
MARGIN = 1e-3
#: Numbers in the arrays of one block of curves: larger arrays do not fit into a processor's cache, and take longer.
BLOCK = 60_000


def fitted(x: ndarray, y: ndarray, at: ndarray, bandwidth: ndarray) -> ndarray:
    """Return the values that local linear regression reads off curves at places, many curves at once.

    At each place a line is fitted to the points around it, weighted by the tricube of their distance over the
    bandwidth (Cleveland, JASA 74, 1979; Fan, Ann. Statist. 21, 1993). A place just beyond the last point is read off
    the line that ends there. The bandwidth grows where it would reach fewer than four points.

    Args:
        x: [R, K] abscissae of K points in any order.
        y: [R, K, D] their ordinates on D curves.
        at: [R, G] places.
        bandwidth: [R], positive.

    Returns:
        [R, G, D], exact where the points lie on a line.
    """
    rows = max(1, BLOCK // (at.shape[1] * x.shape[1]))
    blocks = [slice(first, first + rows) for first in range(0, len(x), rows)]
    parts = [_fitted(*_near(x[block], y[block], at[block], bandwidth[block])) for block in blocks]
    return np.concatenate(parts) if parts else np.empty((0, at.shape[1], y.shape[2]))


def smoother(x: ndarray, at: ndarray, bandwidth: ndarray) -> ndarray:
    """Return the weights of the points in `fitted`, [R, G, K]: its value at place g is sum_k weights[g, k] * y[k]."""
    count = x.shape[1]
    return fitted(x, np.broadcast_to(np.eye(count), (len(x), count, count)), at, bandwidth)


def _near(x: ndarray, y: ndarray, at: ndarray, bandwidth: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Leave out the points that are beyond the bandwidth at every place, where all places have points enough."""
    low, high, reach = at.min(1, keepdims=True), at.max(1, keepdims=True), bandwidth[:, None] / (1 + MARGIN)
    if np.count_nonzero((x > high - reach) & (x < low + reach), axis=1).min() >= NEAREST:
        kept = np.any((x > low - bandwidth[:, None]) & (x < high + bandwidth[:, None]), axis=0)
        x, y = x[:, kept], y[:, kept]
    return x, y, at, bandwidth


def _fitted(x: ndarray, y: ndarray, at: ndarray, bandwidth: ndarray) -> ndarray:
    y = np.concatenate([y, np.ones((*x.shape, 1))], axis=-1)  # the last column sums the weights
    offset = x[:, None, :] - at[:, :, None]
    kernel = np.abs(offset)
    reach = _reach(kernel, bandwidth)[..., None]
    kernel *= 1 / reach  # in place from here on: new arrays would take longer than the arithmetic
    scratch = kernel * kernel
    kernel *= scratch
    np.subtract(1, kernel, out=kernel)
    np.maximum(kernel, 0, out=kernel)
    np.multiply(kernel, kernel, out=scratch)
    kernel *= scratch
    lever = np.multiply(kernel, offset, out=scratch)
    mean, line = kernel @ y, lever @ y
    zeroth, first = mean[..., -1:], line[..., -1:]
    second = np.einsum("rgk,rgk->rg", lever, offset)[..., None]
    spread = zeroth * second - first**2
    flat = spread <= 1e-12 * zeroth**2 * reach**2  # points of one abscissa have a mean, no slope
    return np.where(flat, mean / zeroth, (second * mean - first * line) / np.where(flat, 1.0, spread))[..., :-1]


def _reach(distance: ndarray, bandwidth: ndarray) -> ndarray:
    """Return the bandwidth at each place, [R, G], wide enough for the nearest points; distances are [R, G, K]."""
    reach = np.repeat(bandwidth[:, None], distance.shape[1], axis=1)
    nearest = min(NEAREST, distance.shape[2])
    few = np.count_nonzero(distance < reach[..., None] / (1 + MARGIN), axis=-1) < nearest
    if few.any():  # finding the nearest points takes as long as all the rest
        farthest = np.partition(distance[few], nearest - 1, axis=-1)[:, nearest - 1]
        reach[few] = np.maximum(reach[few], farthest * (1 + MARGIN))
    return reach
