"""A smooth curve through the evaluation points of one run: local linear regression, as weights of the points."""

import numpy as np
from numpy import ndarray

#: Points that the kernel reaches at every place, however narrow its bandwidth is.
NEAREST = 4


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
    offset = x[:, None, :] - at[:, :, None]
    distance = np.abs(offset)
    count = x.shape[1]
    farthest = np.partition(distance, min(NEAREST, count) - 1, axis=-1)[..., min(NEAREST, count) - 1]
    reach = np.maximum(bandwidth[:, None], farthest * (1 + 1e-3))[..., None]
    kernel = np.clip(1 - (distance / reach) ** 3, 0, None) ** 3
    zeroth, first, second = (np.sum(kernel * offset**power, axis=-1, keepdims=True) for power in (0, 1, 2))
    spread = zeroth * second - first**2
    flat = spread <= 1e-12 * zeroth**2 * reach**2  # points of one abscissa have a mean, no slope
    line = (second - first * offset) / np.where(flat, 1.0, spread)
    return kernel * np.where(flat, 1 / zeroth, line)
