"""The estimator against known curves: unbiased, honest intervals, fine enough, and blind to mere slowness."""

import numpy as np
import pytest

from basecap.analysis.comparison import compare_runs, held_out_loss
from basecap.analysis.gap import compare, interval, resample, tokens_to_reach, verdict
from tests.analysis.made_up import World, runs, setting, truth


def estimates(world: World, studies: int, seed: int, resamples: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return value, low and high of the gap in independent studies of one world."""
    rng = np.random.default_rng(seed)
    rows = [compare_runs(["other"], runs(world, rng), setting(resamples), rng)[0] for _ in range(studies)]
    return tuple(np.array([row["gap"][key] for row in rows]) for key in ("value", "low", "high"))


def test_unbiased_with_honest_intervals():
    world = World()
    value, low, high = estimates(world, studies=1000, seed=1)
    error = value - truth(world)
    standard_error = error.std() / np.sqrt(len(error))
    assert standard_error < 0.0002
    assert abs(error.mean()) < 3 * standard_error
    covered = (low <= truth(world)) & (truth(world) <= high)
    assert 0.93 <= covered.mean() <= 0.97


def test_intervals_over_several_seeds_are_honest():
    world = World(documents=150, checkpoints=4, seeds=3, seed_spread=0.01)
    _, low, high = estimates(world, studies=400, seed=2, resamples=200)
    covered = (low <= truth(world)) & (truth(world) <= high)
    assert 0.93 <= covered.mean() <= 0.98


def test_scattered_checkpoints_widen_the_interval_of_a_single_seed():
    world = World(documents=100, checkpoints=10, wobble=0.03)
    _, low, high = estimates(world, studies=500, seed=9, resamples=200)
    covered = (low <= truth(world)) & (truth(world) <= high)
    assert 0.92 <= covered.mean() <= 0.98
    calm = estimates(World(documents=100, checkpoints=10), studies=50, seed=10, resamples=200)
    assert np.median(high - low) > 1.5 * np.median(calm[2] - calm[1])


def test_resolves_two_thousandths_of_a_nat():
    world = World(documents=20_000, checkpoints=6, gap=0.0015, taste=0.03)
    value, low, _ = estimates(world, studies=12, seed=4, resamples=200)
    assert 0.0018 < truth(world) < 0.0022
    assert value.std() < 0.0007
    assert (low > 0).sum() >= 11


def test_mere_slowness_is_no_gap():
    """The slower architecture ends with a higher loss everywhere, yet lies on the curve of the reference."""
    world = World(documents=2000, gap=0.0, taste=0.01)
    rng = np.random.default_rng(5)
    found = runs(world, rng)
    ends = {name: held_out_loss(losses, ["code"])[-1] for (name, _), losses in found.items()}
    row = compare_runs(["other"], found, setting(), rng)[0]
    assert ends["other"] > ends["reference"] + 0.015
    assert row["verdict"] == "keeps" and row["gap"]["low"] < truth(world) < row["gap"]["high"]


def test_a_gap_that_opens_late_is_not_kept():
    world = World(documents=2000, gap=0.0, slope=-0.06, taste=0.01)
    rng = np.random.default_rng(8)
    row = compare_runs(["other"], runs(world, rng), setting(), rng)[0]
    assert row["gap"]["high"] < 0.02 < row["along"]["high"][0]
    assert row["verdict"] == "undecided" and "lowest shared loss" in row["words"]


def test_bits_per_byte_are_the_same_gap_in_another_unit():
    row = compare_runs(["other"], runs(World(), np.random.default_rng(6)), setting(), np.random.default_rng(0))[0]
    assert row["gap"]["bits_per_byte"]["value"] == pytest.approx(row["gap"]["value"] / 4 / np.log(2))
    assert row["gap"]["value"] == pytest.approx(np.mean([part["value"] for part in row["domains"]]))
    assert row["gap"]["value"] == pytest.approx(np.mean(row["along"]["value"]))


def test_draws_weigh_documents_by_their_tokens():
    nats, tokens = np.array([[2.0, 4.0], [30.0, 60.0]]), np.array([1, 10])
    summed, counted = resample(nats, tokens, 1000, np.random.default_rng(0))
    np.testing.assert_allclose(summed[0] / counted[0], [32 / 11, 64 / 11])
    combinations = {(float(one), float(count)) for one, count in zip(summed[:, 0], counted, strict=True)}
    assert combinations == {(32.0, 11.0), (4.0, 2.0), (60.0, 20.0)}


def test_curves_that_share_no_range_cannot_be_compared():
    low, high = np.array([[1.0, 2.0, 3.0]]), np.array([[4.0, 5.0, 6.0]])
    places, difference = compare(low, low, high, high)
    assert np.isnan(places).all() and np.isnan(difference).all()
    single = np.array([[2.0]])
    assert np.isnan(compare(single, single, low, low)[1]).all()


def test_too_many_draws_without_a_shared_range_give_no_interval():
    values = np.zeros((1, 101))
    values[0, 1:11] = np.nan
    found = interval(values, np.random.default_rng(0))
    assert found.value == 0 and np.isnan(found.low) and np.isnan(found.high)
    values[0, 5:] = 0.0
    assert interval(values, np.random.default_rng(0)).high == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.01, 0.01, "keeps"),
        (0.001, 0.019, "keeps"),
        (-0.03, -0.01, "keeps"),
        (0.001, 0.021, "degrades"),
        (0.03, 0.04, "degrades"),
        (-0.001, 0.021, "undecided"),
        (float("nan"), float("nan"), "undecided"),
    ],
)
def test_verdict(low, high, expected):
    assert verdict(low, high, tolerance=0.02) == expected


def test_tokens_to_reach_follows_the_logarithm():
    tokens = np.array([1e3, 1e4, 1e5])
    assert tokens_to_reach(1.0, tokens, np.array([5.0, 4.0, 3.0])) == pytest.approx(1e7)
    assert tokens_to_reach(1.0, tokens, np.array([3.0, 3.0, 3.0])) is None
    assert tokens_to_reach(-1e3, tokens, np.array([5.0, 4.0, 3.0])) is None
    assert tokens_to_reach(1.0, tokens[:1], np.array([5.0])) is None
