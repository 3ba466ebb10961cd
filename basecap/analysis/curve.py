"""A curve through points that neither overshoots nor bends where the points do not."""

import numpy as np
from numpy import ndarray


def interpolate(x: ndarray, y: ndarray, at: ndarray) -> ndarray:
    """Interpolate by monotone piecewise cubics, many curves at once.

    Between two points the curve stays between their values, so it rises and falls only where the points do. Slopes are
    those of Fritsch and Butland (SIAM J. Sci. Stat. Comput. 5, 1984), as in PCHIP; two points are joined by a line.
    Written here because scipy's takes one set of places x for all curves.

    Args:
        x: [..., K] ascending places, K >= 2. Equal neighbours are allowed: the curve steps there.
        y: [..., K] values.
        at: [..., G] where to evaluate, inside the range of x.

    Returns:
        [..., G].
    """
    width = np.maximum(np.diff(x), 1e-12)
    rise = np.diff(y) / width
    slope = _slopes(width, rise)
    cell = (at[..., :, None] >= x[..., None, 1:-1]).sum(-1)

    def take(values: ndarray) -> ndarray:
        return np.take_along_axis(values, cell, axis=-1)

    step = take(width)
    t = (at - take(x[..., :-1])) / step
    start, end = take(slope[..., :-1]), take(slope[..., 1:])
    steep = take(rise)
    quadratic = 3 * steep - 2 * start - end
    cubic = start + end - 2 * steep
    return take(y[..., :-1]) + step * t * (start + t * (quadratic + t * cubic))


def _slopes(width: ndarray, rise: ndarray) -> ndarray:
    """Return the derivative at each of K points from the K - 1 widths and secants between them."""
    if width.shape[-1] == 1:
        return np.concatenate([rise, rise], axis=-1)
    before, after = width[..., :-1], width[..., 1:]
    left, right = rise[..., :-1], rise[..., 1:]
    same_sign = left * right > 0
    safe_left, safe_right = np.where(same_sign, left, 1.0), np.where(same_sign, right, 1.0)
    weight_left, weight_right = before + 2 * after, 2 * before + after
    mean = (weight_left + weight_right) / (weight_left / safe_left + weight_right / safe_right)
    inner = np.where(same_sign, mean, 0.0)
    first = _end_slope(width[..., 0], width[..., 1], rise[..., 0], rise[..., 1])
    last = _end_slope(width[..., -1], width[..., -2], rise[..., -1], rise[..., -2])
    return np.concatenate([first[..., None], inner, last[..., None]], axis=-1)


def _end_slope(near: ndarray, far: ndarray, rise: ndarray, next_rise: ndarray) -> ndarray:
    """Return the three-point derivative at an end, cut back so that the end cell stays monotone."""
    slope = ((2 * near + far) * rise - near * next_rise) / (near + far)
    slope = np.where(slope * rise <= 0, 0.0, slope)
    turns = (rise * next_rise < 0) & (np.abs(slope) > 3 * np.abs(rise))
    return np.where(turns, 3 * rise, slope)
