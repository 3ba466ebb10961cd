"""The curve through the points: the same as scipy's PCHIP, and never beyond the points."""

import numpy as np
import pytest
from scipy.interpolate import PchipInterpolator

from basecap.analysis.curve import interpolate


@pytest.mark.parametrize("points", [2, 3, 4, 10])
@pytest.mark.parametrize("monotone", [True, False])
def test_equals_scipy(points, monotone):
    rng = np.random.default_rng(points)
    x = np.sort(rng.random((50, points)) * 3, axis=1)
    y = rng.normal(size=(50, points))
    y = np.sort(y, axis=1) if monotone else y
    at = np.linspace(x[:, 0], x[:, -1], 40, axis=1)
    expected = np.stack([PchipInterpolator(*pair)(place) for *pair, place in zip(x, y, at, strict=True)])
    np.testing.assert_allclose(interpolate(x, y, at), expected, atol=1e-10)


def test_rises_where_the_points_rise_and_stays_between_them():
    x, y = np.array([0.0, 1.0, 1.1, 4.0]), np.array([0.0, 0.1, 3.0, 3.1])
    values = interpolate(x, y, np.linspace(0, 4, 200))
    assert (np.diff(values) >= 0).all() and values.min() >= 0 and values.max() <= 3.1


def test_equal_neighbours_make_a_step():
    x, y = np.array([0.0, 1.0, 1.0, 2.0]), np.array([0.0, 0.0, 1.0, 1.0])
    np.testing.assert_allclose(interpolate(x, y, np.array([0.5, 1.5])), [0.0, 1.0], atol=1e-9)
