"""A smooth curve through the evaluation points of one run: local linear regression, as weights of the points."""

import numpy as np
from numpy import ndarray

#: Points that the kernel reaches at every place, however narrow its bandwidth is.
NEAREST = 4
#: Numbers in the arrays of one block of curves: larger arrays do not fit into a processor's cache, and take longer.
BLOCK = 60_000


def smoother(x: ndarray, at: ndarray, bandwidth: ndarray) -> ndarray:
    """Return the weights with which local linear regression reads a curve off its points, many curves at once.

    At each place a line is fitted to the points around it, weighted by the tricube of their distance over the
    bandwidth (Cleveland, JASA 74, 1979; Fan, Ann. Statist. 21, 1993). A place just beyond the last point is read off
    the line that ends there. The bandwidth grows where it would reach fewer than four points.

    Args:
        x: [R, K] abscissae of K points in any order.
        at: [R, G] places.
        bandwidth: [R], positive.

    Returns:
        [R, G, K]; the curve at place g is sum_k weights[g, k] * y[k], exact where the points lie on a line.
    """
    rows = max(1, BLOCK // (at.shape[1] * x.shape[1]))
    blocks = [slice(first, first + rows) for first in range(0, len(x), rows)]
    return np.concatenate([_smoother(x[block], at[block], bandwidth[block]) for block in blocks])


def _smoother(x: ndarray, at: ndarray, bandwidth: ndarray) -> ndarray:
    offset = x[:, None, :] - at[:, :, None]
    distance = np.abs(offset)
    count = x.shape[1]
    farthest = np.partition(distance, min(NEAREST, count) - 1, axis=-1)[..., min(NEAREST, count) - 1]
    reach = np.maximum(bandwidth[:, None], farthest * (1 + 1e-3))[..., None]
    cube = (distance / reach) ** 2 * (distance / reach)
    kernel = np.clip(1 - cube, 0, None)
    kernel *= kernel * kernel
    lever = kernel * offset
    zeroth, first, second = (part.sum(-1, keepdims=True) for part in (kernel, lever, lever * offset))
    spread = zeroth * second - first**2
    flat = spread <= 1e-12 * zeroth**2 * reach**2  # points of one abscissa have a mean, no slope
    line = (second - first * offset) / np.where(flat, 1.0, spread)
    return kernel * np.where(flat, 1 / zeroth, line)
