"""The curve through evaluation points: local lines, exact where the points lie on a line."""

import numpy as np
import pytest

from basecap.analysis.curve import smoother


def test_is_weighted_least_squares_at_each_place():
    rng = np.random.default_rng(0)
    x, at, bandwidth = rng.random((3, 12)) * 2, rng.random((3, 5)) * 2, np.array([0.8, 1.2, 3.0])
    weights = smoother(x, at, bandwidth)
    for draw in range(3):
        for place in range(5):
            offset = x[draw] - at[draw, place]
            root = np.sqrt(np.clip(1 - (np.abs(offset) / bandwidth[draw]) ** 3, 0, None) ** 3)
            design = np.stack([np.ones(12), offset], axis=1) * root[:, None]
            expected = np.linalg.pinv(design)[0] * root
            np.testing.assert_allclose(weights[draw, place], expected, atol=1e-9)


@pytest.mark.parametrize("bandwidth", [0.01, 0.5, 10.0])
def test_a_line_is_kept_also_beyond_its_last_point_and_with_any_bandwidth(bandwidth):
    x = np.sort(np.random.default_rng(1).random((1, 9)))
    at = np.linspace(x.min() - 0.2, x.max() + 0.2, 30)[None]
    np.testing.assert_allclose(smoother(x, at, np.array([bandwidth]))[0] @ (3 - 2 * x[0]), 3 - 2 * at[0], atol=1e-8)


def test_at_least_four_points_are_reached():
    x = np.array([[0.0, 1.0, 2.0, 3.0, 4.0]])
    weights = smoother(x, np.array([[0.1]]), np.array([0.01]))[0, 0]
    assert (weights != 0).sum() == 4 and weights[4] == 0


def test_points_of_one_abscissa_give_their_mean():
    weights = smoother(np.full((1, 6), 2.0), np.array([[2.0, 2.5]]), np.array([1.0]))
    np.testing.assert_allclose(weights, 1 / 6)
