"""Intervals of shares and of their sums, by values worked out by hand."""

import numpy as np
import pytest

from basecap.analysis.tasks.shares import Share, estimate, wilson


@pytest.mark.parametrize(
    ("share", "low", "high"),
    [(Share(0.9, 100), 0.825634, 0.944771), (Share(1.0, 100), 0.963007, 1.0), (Share(0.0, 10), 0.0, 0.277533)],
)
def test_wilson(share, low, high):
    assert wilson(share) == pytest.approx((low, high), abs=1e-6)
    assert estimate([{"a": share}], {"a": 1.0}).low == pytest.approx(low, abs=1e-6)


def test_a_mean_over_cells_adds_squares_of_the_distances():
    found = estimate([{"a": Share(0.9, 100), "b": Share(1.0, 100)}], {"a": 0.5, "b": 0.5})
    assert found.value == pytest.approx(0.95)
    assert found.low == pytest.approx(0.95 - 0.5 * np.hypot(0.9 - 0.825634, 1 - 0.963007), abs=1e-5)
    assert found.high == pytest.approx(0.95 + 0.5 * (0.944771 - 0.9), abs=1e-5)


def test_a_difference_turns_the_ends_of_what_is_subtracted():
    found = estimate([{"a": Share(1.0, 100), "b": Share(0.9, 100)}], {"a": 1.0, "b": -1.0})
    assert found.low == pytest.approx(0.1 - np.hypot(1 - 0.963007, 0.944771 - 0.9), abs=1e-5)
    assert found.high == pytest.approx(0.1 + (0.9 - 0.825634), abs=1e-5)


def test_runs_have_a_t_interval_that_is_never_narrower_than_the_examples_allow():
    three = estimate([{"a": Share(value, 10_000)} for value in (0.80, 0.82, 0.84)], {"a": 1.0})
    assert three.value == pytest.approx(0.82)
    assert (three.low, three.high) == pytest.approx((0.82 - 0.049683, 0.82 + 0.049683), abs=1e-5)
    two = estimate([{"a": Share(value, 100)} for value in (0.8, 0.9)], {"a": 1.0})
    assert two.low == pytest.approx(0.85 - 12.7062 * 0.05, abs=1e-4) and two.high == 1.0
    alike = estimate([{"a": Share(1.0, 100)}] * 3, {"a": 1.0})
    assert (alike.low, alike.high) == pytest.approx((0.963007, 1.0), abs=1e-6)


def test_intervals_hold_where_the_values_of_an_example_are_right_or_wrong_together():
    generator, held, studies = np.random.default_rng(5), 0, 300
    truth = np.linspace(0.2, 0.99, 8)
    for _ in range(studies):
        right = generator.binomial(100, truth) / 100
        unit = {cell: Share(float(share), 100) for cell, share in enumerate(right)}
        found = estimate([unit], dict.fromkeys(unit, 1 / len(truth)))
        held += found.low <= truth.mean() <= found.high
    assert 0.93 <= held / studies <= 0.99
