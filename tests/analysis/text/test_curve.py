"""The curve through evaluation points: local lines, exact where the points lie on a line."""

import numpy as np
import pytest

from basecap.analysis.text.curve import fitted, smoother


def test_is_weighted_least_squares_at_each_place():
    rng = np.random.default_rng(0)
    x, at = rng.random((3, 12)) * 2, rng.random(5) * 2
    for bandwidth, own in zip((0.8, 1.2, 3.0), x, strict=True):
        weights = smoother(own, at, bandwidth)
        for place in range(5):
            offset = own - at[place]
            root = np.sqrt(np.clip(1 - (np.abs(offset) / bandwidth) ** 3, 0, None) ** 3)
            design = np.stack([np.ones(12), offset], axis=1) * root[:, None]
            expected = np.linalg.pinv(design)[0] * root
            np.testing.assert_allclose(weights[place], expected, atol=1e-9)


@pytest.mark.parametrize("points", [10, 300])
def test_many_curves_are_those_of_their_smoothers(points):
    """Few points, where the kernel grows at some places; many points in several blocks, most of them out of reach."""
    rng = np.random.default_rng(0)
    x, y, at = rng.random((40, points)) * 5, rng.random((2, 40, points)), np.linspace(2, 2.5, 16)
    expected = np.stack([smoother(own, at, 0.6) @ y[:, row].T for row, own in enumerate(x)])
    np.testing.assert_allclose(fitted(x, y, at, 0.6), expected, atol=1e-9)


@pytest.mark.parametrize("bandwidth", [0.01, 0.5, 10.0])
def test_a_line_is_kept_also_beyond_its_last_point_and_with_any_bandwidth(bandwidth):
    x = np.sort(np.random.default_rng(1).random(9))
    at = np.linspace(x.min() - 0.2, x.max() + 0.2, 30)
    np.testing.assert_allclose(smoother(x, at, bandwidth) @ (3 - 2 * x), 3 - 2 * at, atol=1e-8)


def test_at_least_four_points_are_reached():
    weights = smoother(np.array([0.0, 1.0, 2.0, 3.0, 4.0]), np.array([0.1]), 0.01)[0]
    assert (weights != 0).sum() == 4 and weights[4] == 0


def test_points_of_one_abscissa_give_their_mean():
    weights = smoother(np.full(6, 2.0), np.array([2.0, 2.5]), 1.0)
    np.testing.assert_allclose(weights, 1 / 6)
