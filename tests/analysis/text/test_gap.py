"""The estimator against known curves: unbiased, honest intervals, fine enough, and blind to mere slowness."""

from dataclasses import replace

import numpy as np
import pytest

from basecap.analysis.rows import Interval, Row
from basecap.analysis.text.comparison import compare_runs
from basecap.analysis.text.draws import FEWEST_DOCUMENTS, Curve, Draws, Runs, draw
from basecap.analysis.text.gap import LONGEST, Range, final, more_tokens, tokens_to_reach, upper_end
from basecap.analysis.text.losses import MOST_POINTS, DomainLosses, RunLosses
from basecap.analysis.text.measured import Setting
from basecap.analysis.text.worth import judge
from tests.analysis.text.made_up import BIGRAM, OOD, REFERENCE, TRAIN, World, curve, pretraining, runs, setting
from tests.analysis.text.simulate import simulate


def compare(world: World, seed: int = 0, **changes) -> list[Row]:
    """Return the rows of one study."""
    return rows_of(world.names, runs(world, np.random.default_rng(seed)), setting(**changes), _draws())


def rows_of(names: list[str], found: Runs, compared: Setting, generator: np.random.Generator) -> list[Row]:
    """Return the rows of made-up runs."""
    return compare_runs(names, found, compared, generator).rows


def _draws() -> np.random.Generator:
    return np.random.default_rng(0)


def test_known_gaps_are_found_between_models_of_different_speed():
    world = World(gaps=(0.0, 0.05, 0.3), noise=(0.0,) * 4, documents=800, taste=0.01, wobble=0.002)
    rows = compare(world, seed=1)
    assert [row.gap.value for row in rows] == pytest.approx([0.0, 0.05, 0.3], abs=0.004)
    for row, truth in zip(rows, world.gaps, strict=True):
        assert row.gap.low < truth < row.gap.high and row.gap.high - row.gap.low < 0.02
        assert [part.domain for part in row.domains] == list(OOD)
        assert np.mean([part.value for part in row.domains]) == pytest.approx(row.gap.value)
        assert row.gap.bits_per_byte.value == pytest.approx(row.gap.value / 4 / np.log(2))
        assert row.gap.single.high - row.gap.single.low <= row.gap.high - row.gap.low
        assert row.along.low[0] < truth < row.along.high[0]
    assert [row.verdict for row in rows] == ["keeps", "degrades", "degrades"]


def test_runs_with_losses_equal_to_the_bit_are_one_seed():
    world = World(gaps=(0.1,), seeds=2, reference_seeds=2)
    found = runs(world, np.random.default_rng(0))
    twins = {**found, ("other 0", 2): found["other 0", 0], (REFERENCE, 2): found[REFERENCE, 1]}
    (plain,), (row,) = (rows_of(world.names, each, setting(), _draws()) for each in (found, twins))
    assert row.gap == plain.gap and row.seeds == row.reference_seeds == [0, 1]
    assert [(run.seed, run.why) for run in (*row.left_out, *row.reference_left_out)] == [
        (2, "all its losses are equal to those of seed 0: both are one run"),
        (2, "all its losses are equal to those of seed 1: both are one run"),
    ]


def test_the_trained_range_begins_at_half_the_tokens_and_ends_at_the_slower_model():
    world = World(gaps=(0.0, 0.0), noise=(0.0,) * 3, speeds=(1.0, 1.3, 0.8), documents=600, taste=0.01)
    fast, slow = compare(world)
    half, end = pretraining(1.0, 20)[9], pretraining(1.0, 20)[-1]
    assert fast.range == pytest.approx((end, half), abs=0.03)
    assert slow.range == pytest.approx((pretraining(0.8, 20)[-1], half), abs=0.03)
    later, _ = compare(world, share=0.8)
    assert later.range[1] == pytest.approx(pretraining(1.0, 20)[15], abs=0.03)


def test_the_range_never_begins_above_a_bigram_model():
    world = World(gaps=(0.0,), noise=(0.0, 0.0), documents=600, taste=0.01)
    assert compare(world, bigram=3.15)[0].range[1] == 3.15
    (row,) = compare(world, bigram=2.0)
    assert (row.verdict, row.gap) == ("behind", None)
    assert "a bigram model at 2.000" in row.words and "more tokens" in row.words


def test_a_model_that_has_not_reached_the_range_is_behind():
    (row,) = compare(World(gaps=(0.0,), noise=(0.0, 0.0), speeds=(1.0, 0.4)))
    assert (row.verdict, row.gap, [run.seed for run in row.left_out]) == ("behind", None, [0, 1, 2])
    assert "the trained range begins at" in row.words and "more tokens" in row.words


def test_a_model_that_has_just_entered_the_range_needs_longer_training_or_more_points():
    found = runs(World(gaps=(0.0,), noise=(0.0, 0.0), speeds=(1.0, 1.0)), np.random.default_rng(0))
    for seed in range(3):
        found["other 0", seed] = _points(found["other 0", seed], range(11), trained=np.arange(1, 12) * 1000)
    (row,) = rows_of(["other 0"], found, setting(), _draws())
    assert row.gap is None and "needs 4: train longer, or evaluate more often" in row.words


def test_a_seed_that_never_learned_is_left_out_and_named():
    found = runs(World(gaps=(0.0,), noise=(0.0, 0.0)), np.random.default_rng(0))
    stuck = found["other 0", 1]
    found["other 0", 1] = _points(stuck, [*range(5)] + [4] * 15, trained=stuck.trained)
    (row,) = rows_of(["other 0"], found, setting(), _draws())
    assert row.seeds == [0, 2] and [run.seed for run in row.left_out] == [1]
    assert "left out: seed 1 (its held-out loss ends at" in row.words


@pytest.mark.parametrize("ood", [OOD, ()])
def test_a_reference_run_that_diverged_moves_nothing_and_is_named(ood):
    """One that ends above where the median run was at half of its tokens, wherever it was before."""
    world = World(gaps=(0.0, 0.02), noise=(0.02,) * 3, reference_seeds=5)
    found = runs(world, np.random.default_rng(0))
    without = {key: run for key, run in found.items() if key != (REFERENCE, 4)}
    last = found[REFERENCE, 4]
    found[REFERENCE, 4] = _points(last, [*range(8), *[3] * 12], trained=last.trained)
    rows, expected = (rows_of(world.names, runs, setting(ood=ood), _draws()) for runs in (found, without))
    for row, other in zip(rows, expected, strict=True):
        (diverged,) = row.reference_left_out
        assert diverged.seed == 4 and diverged.why.startswith("it diverged: its ") and "50 % of" in diverged.why
        numbers = {"along": None, "gap": None, "weighted": None, "domains": ()}
        assert replace(row, reference_left_out=[], **numbers) == replace(other, **numbers)
        for mine, same in zip((row.gap, row.weighted), (other.gap, other.weighted), strict=True):
            # Another run among the draws of documents changes the rounding of a matrix product, no more.
            ends = [(found.value, found.low, found.high, found.error) for found in (mine, same)]
            assert ends[0] == pytest.approx(ends[1], rel=0, abs=1e-12) and mine.verdict == same.verdict
    assert other.reference_seeds == [0, 1, 2, 3] and not other.reference_left_out


def test_a_reference_that_no_longer_learns_is_not_said_to_need_more_tokens():
    """From half of its tokens on it stands still, below a bigram model or above it."""
    world = World(gaps=(0.0,), noise=(0.0, 0.0))
    found = runs(world, np.random.default_rng(0))
    for seed in range(3):
        prose = found[REFERENCE, seed].domains["prose"]
        prose.nats[:, 10:] = prose.nats[:, 9:10] + np.outer(prose.tokens, np.linspace(0.001, 0.009, 10))
    for bigram, said in ((BIGRAM, "no longer falls; train it on other data"), (2.0, "change train.lr, train.tokens")):
        (row,) = rows_of(["other 0"], found, setting(bigram=bigram), _draws())
        assert row.verdict == "undecided" and row.gap is None and said in row.words
        assert "train about" not in row.words


def test_curves_end_where_the_held_out_loss_rises():
    """Of the reference, whose trained range ends there, and of a row: later points are left out, and this is said."""
    world = World(gaps=(0.05,), noise=(0.0, 0.0), documents=400, taste=0.01, wobble=0.002)
    found = runs(world, np.random.default_rng(0))
    expected = {key: _points(run, range(14)) for key, run in found.items()}
    for name in (REFERENCE, "other 0"):
        for seed in range(3):
            run = found[name, seed]
            found[name, seed] = _points(run, [*range(14), *range(12, 6, -1)], trained=run.trained)
            run.domains["code"].nats[:, 14:] += 9.0
    both = [compare_runs(world.names, each, setting(), _draws()) for each in (found, expected)]
    assert [one.maturity.rises for one in both] == [14_000.0, None]
    assert [one.rows[0].rises for one in both] == [14_000.0, None]
    assert both[0].rows[0].range == both[1].rows[0].range and both[0].rows[0].gap.value == both[1].rows[0].gap.value
    assert "held-out loss rises after 14,000 tokens" in both[0].rows[0].words


@pytest.mark.parametrize(
    ("name", "low", "verdict", "said"),
    [
        (REFERENCE, 3, "undecided", "the reference has 3 evaluation points near the trained range before its held-out"),
        (
            "other 0",
            12,
            "undecided",
            "it has 2 evaluation points near the trained range before its held-out loss rises",
        ),
        ("other 0", 6, "behind", " at its lowest and rises after 6,000 tokens, the trained range begins at "),
    ],
)
def test_who_overfits_too_soon_needs_more_text(name, low, verdict, said):
    """After `low` points the held-out loss rises: more tokens of the same text help nobody."""
    world = World(gaps=(0.05,), noise=(0.0, 0.0), documents=400, taste=0.01, wobble=0.002)
    found = runs(world, np.random.default_rng(0))
    for key in [key for key in found if key[0] == name]:
        run = found[key]
        found[key] = _points(run, [*range(low), *([low - 2] * (20 - low))], trained=run.trained)
    (row,) = rows_of(world.names, found, setting(), _draws())
    assert row.verdict == verdict and said in row.words and "train on more text" in row.words
    assert "more tokens" not in row.words


def test_a_run_that_stopped_early_does_not_count_where_another_has_finished():
    found = runs(World(gaps=(0.0,), noise=(0.0, 0.0)), np.random.default_rng(0))
    for key in ((REFERENCE, 1), ("other 0", 1)):
        found[key] = replace(_points(found[key], range(19)), finished=False)
    (row,) = rows_of(["other 0"], found, setting(), _draws())
    for seeds, left_out in ((row.seeds, row.left_out), (row.reference_seeds, row.reference_left_out)):
        assert seeds == [0, 2]
        assert [(run.seed, run.why) for run in left_out] == [(1, "it ends after 19,000 of 20,000 tokens")]
    unfinished = {key: replace(run, finished=False) for key, run in found.items()}
    assert rows_of(["other 0"], unfinished, setting(), _draws())[0].seeds == [0, 1, 2]


@pytest.mark.parametrize(("points", "found"), [(20, True), (4, False), (1, False)])
def test_too_few_points_give_no_gap(points, found):
    (row,) = compare(World(gaps=(0.0,), noise=(0.0, 0.0), points=points, documents=200))
    assert (row.gap is not None) == found
    assert ("evaluate more often" in row.words) != found
    assert ("has 1 evaluation point near" in row.words) == (points == 1)


def test_mere_slowness_is_no_gap():
    """The slower architecture ends with a higher loss everywhere, yet lies on the curve of the reference."""
    world = World(gaps=(0.0,), noise=(0.0, 0.0), speeds=(1.0, 0.7), documents=1000, taste=0.01, wobble=0.002)
    found = runs(world, np.random.default_rng(5))
    ends = {
        name: np.sum(run.domains["code"].nats[:, -1]) / run.domains["code"].tokens.sum() for name, run in _of(found)
    }
    (row,) = rows_of(world.names, found, setting(), _draws())
    assert ends["other 0"] > ends[REFERENCE] + 0.03
    assert row.verdict == "keeps" and abs(row.gap.value) < 0.01


def _of(found: dict) -> list:
    return [(name, run) for (name, seed), run in found.items() if seed == 0]


def test_what_a_gap_is_worth_is_read_off_the_reference():
    """Its loss falls by a known slope over the logarithm of tokens: so much of them a gap costs."""
    world = World(gaps=(0.05,), noise=(0.0, 0.0), documents=600, taste=0.01, wobble=0.0)
    (row,) = compare(world)
    x = pretraining(1.0, 20)[9:]
    fall = np.polyfit(np.log(np.arange(10, 21)), curve(x), 1)[0]
    assert row.gap.tokens.value == pytest.approx(np.exp(row.gap.value / fall), rel=0.02)
    assert row.gap.tokens.low < row.gap.tokens.value < row.gap.tokens.high
    assert row.gap.tolerance == pytest.approx(fall * np.log(0.9), rel=0.02)
    assert compare(world, cost=0.5)[0].gap.tolerance == pytest.approx(fall * np.log(0.5), rel=0.02)


def test_a_reference_that_no_longer_falls_out_of_domain_decides_nothing():
    found = runs(World(gaps=(0.0,), noise=(0.0, 0.0)), np.random.default_rng(0))
    for run in found.values():
        for domain in OOD:
            run.domains[domain].nats[:] = run.domains[domain].nats[:, ::-1]
    (row,) = rows_of(["other 0"], found, setting(), _draws())
    assert row.gap.tolerance is None and row.gap.tokens is None
    assert row.verdict == "undecided" and "does not fall while it trains; train longer" in row.words


def test_a_gap_is_worth_a_finite_share_where_the_reference_hardly_falls():
    found = runs(World(gaps=(0.0,), noise=(0.0, 0.0)), np.random.default_rng(0))
    for (name, _), run in found.items():
        for domain in OOD:
            losses = run.domains[domain]
            falling = (3.0 if name == REFERENCE else 2.5) - 1e-4 * np.log(run.trained)
            losses.nats[:] = losses.tokens[:, None] * falling
    (row,) = rows_of(["other 0"], found, setting(), _draws())
    assert row.verdict == "keeps" and row.gap.tokens.value == pytest.approx(np.exp(40))


@pytest.mark.parametrize(
    ("value", "half", "split", "expected"),
    [
        (0.0, 0.05, None, "keeps"),
        (0.04, 0.03, None, "keeps"),
        (-0.3, 0.2, None, "keeps"),
        (0.0, 0.2, None, "undecided"),
        (0.09, 0.05, None, "undecided"),  # it is worse, by less than the tolerance as far as one can tell
        (0.11, 0.05, None, "degrades"),
        (0.3, 0.2, 0.25, "degrades"),
        (0.3, 0.2, 0.35, "undecided"),
    ],
)
def test_verdict(value, half, split, expected):
    found = Interval(value=value, low=value - half, high=value + half)
    shares = Interval(value=np.exp(-value), low=np.exp(-value - half), high=np.exp(half - value))
    assert judge(found, shares, 0.1, 1 - np.exp(-0.1), split) == expected
    assert judge(found, None, None, 0.1, split) == "undecided"


def test_looks_widen_intervals_and_leave_the_range_between_groups_of_the_reference():
    world = World(gaps=(0.0,), noise=(0.05, 0.05), reference_seeds=8)
    (last,), (first,) = compare(world), compare(world, level=0.005)
    assert first.gap.high > last.gap.high and first.gap.split == last.gap.split


def test_words_say_why_and_what_would_decide():
    world = World(gaps=(0.0, 0.03, 0.05), noise=(0.0, 0.0, 0.0, 0.15), documents=600, taste=0.01, wobble=0.002)
    kept, worse, open_ = compare(world, cost=0.5, seconds=dict.fromkeys((REFERENCE, *world.names), 1800.0))
    assert kept.words.startswith("any gap is smaller than the tolerance of")
    assert worse.verdict == "keeps" and worse.words.startswith("measurably worse, by less than the tolerance")
    assert open_.verdict == "undecided" and "includes both 0 and the tolerance" in open_.words
    assert open_.more.seconds == open_.more.runs * 3600 and f"; {open_.more.runs} more run" in open_.words


def test_with_one_seed_of_each_intervals_hold_for_these_models_only():
    world = World(gaps=(0.0,), noise=(0.03, 0.03), seeds=1, reference_seeds=1)
    (row,) = compare(world)
    assert row.conditional and row.gap.low < row.gap.high and "these trained models only" in row.words
    (more,) = compare(replace(world, reference_seeds=4))
    assert not more.conditional and more.gap.split is not None
    assert more.words.endswith("; with one run, how much it varies from seed to seed is taken from the others")
    assert more.gap.high - more.gap.low > row.gap.high - row.gap.low


def test_the_band_of_a_curve_is_as_wide_as_the_interval_of_its_row():
    """Also where the reference is the noisiest; runs differ by the same at every loss here."""
    world = World(gaps=(0.0,) * 8, noise=(0.12, *[0.03] * 8), wobble=0.001)
    for row in compare(world):
        ends = np.array(row.along.high) - np.array(row.along.low)
        assert ends.tolist() == pytest.approx([row.gap.single.high - row.gap.single.low] * len(ends), rel=0.1)


def test_the_noisier_domain_counts_less_in_the_weighted_mean():
    found = runs(World(gaps=(0.0, 0.0), noise=(0.0,) * 3), np.random.default_rng(0))
    rng = np.random.default_rng(1)
    for run in found.values():
        code = run.domains["code"]
        code.nats[:] += code.tokens[:, None] * (0.3 + rng.normal(0, 0.2))
    row = rows_of(["other 0"], found, setting(), _draws())[0]
    assert row.weighted.error < 0.5 * row.gap.error
    assert abs(row.weighted.value - row.domains[1].value) < 0.2 * abs(row.weighted.value - row.domains[0].value)


def test_without_unseen_domains_models_differ_at_equal_training_loss():
    world = World(gaps=(0.0,), noise=(0.0, 0.0), documents=300)
    (row,) = compare(world, ood=())
    assert row.verdict == "none" and row.gap.low < 0 < row.gap.high
    assert [part.domain for part in row.domains] == list(TRAIN) and row.words.startswith("alike: any")
    (slow,) = compare(replace(world, speeds=(1.0, 0.4)), ood=())
    assert slow.words.startswith("its training loss ends at")


@pytest.mark.parametrize("ood", [None, ()])
def test_a_tested_domain_of_few_documents_is_left_out(ood):
    """The others are measured as if the study had not tested it."""
    world = World(gaps=(0.0,), noise=(0.0, 0.0))
    found = runs(world, np.random.default_rng(4))
    small = "forum" if ood is None else "prose"
    first = found[next(iter(found))].domains
    for run in found.values():
        few = vars(run.domains[small])
        run.domains[small] = DomainLosses(**{key: values[:20] for key, values in few.items() if key != "classes"})
    settings = setting() if ood is None else setting(train=("prose", "code"), ood=())
    (row,) = rows_of(["other 0"], found, settings, _draws())
    assert small in first and [part.domain for part in row.domains] == ["code"] and row.gap is not None
    without = setting(ood=("code",)) if ood is None else setting(train=("code",), ood=())
    assert rows_of(["other 0"], found, without, _draws()) == [row]


def test_rows_share_draws_and_do_not_move_each_other():
    world = World(gaps=(0.0, 0.02), noise=(0.02,) * 3)
    found = runs(world, np.random.default_rng(3))
    both = rows_of(world.names, found, setting(), _draws())
    alone = rows_of(world.names[:1], found, setting(), _draws())
    assert both[0].gap.value == alone[0].gap.value and both[0].range == alone[0].range
    assert both[0].gap.high - both[0].gap.low > 0 and both == rows_of(world.names, found, setting(), _draws())


@pytest.mark.parametrize(("documents", "trusted"), [(FEWEST_DOCUMENTS - 1, False), (FEWEST_DOCUMENTS, True)])
def test_few_documents_give_no_interval(documents, trusted):
    (row,) = compare(World(gaps=(0.0,), noise=(0.0, 0.0), documents=documents))
    assert (row.gap is not None) == trusted == ("held-out documents" not in row.words)


@pytest.mark.parametrize(("documents", "trusted"), [(1, False), (9, False), (10, True)])
def test_a_training_domain_of_few_documents_gives_no_interval(documents, trusted):
    """However many the others hold: a single document is the same in every draw, as if its losses were certain."""
    found = runs(World(gaps=(0.0,), noise=(0.0, 0.0)), np.random.default_rng(4))
    for run in found.values():
        prose = vars(run.domains["prose"])
        run.domains["books"] = DomainLosses(
            **{key: values[:documents] for key, values in prose.items() if key != "classes"}
        )
    (row,) = rows_of(["other 0"], found, setting(train=("prose", "books")), _draws())
    assert (row.gap is not None) == trusted == ("10 of one training domain" not in row.words)


def test_clusters_are_drawn_together_where_there_are_enough():
    """Documents that are alike widen the interval; with few clusters it speaks of these sources."""
    world = World(gaps=(0.0,), noise=(0.0, 0.0), documents=320, cluster=10, taste=0.4)
    (row,) = compare(world)
    found = runs(world, np.random.default_rng(0))
    for run in found.values():
        for losses in run.domains.values():
            losses.clusters[:] = np.arange(320)
    (single,) = rows_of(["other 0"], found, setting(), _draws())
    assert row.gap.error > 1.2 * single.gap.error and "these sources" not in row.words
    (few,) = compare(replace(world, cluster=40))
    assert "conditional on these sources (few clusters: prose, code, forum)" in few.words


def test_draws_weigh_documents_by_their_tokens():
    nats, tokens = np.array([[2.0, 4.0], [30.0, 60.0]]), np.array([1, 10])
    draws = Draws.of(np.arange(2), tokens, 1000, np.random.default_rng(0))
    summed = np.empty((1001, 2))
    draws.sum_into(summed, nats)
    np.testing.assert_allclose(summed[0] / draws.size[0], [32 / 11, 64 / 11])
    combinations = {(float(one), float(count)) for one, count in zip(summed[:, 0], draws.size, strict=True)}
    assert combinations == {(32.0, 11.0), (4.0, 2.0), (60.0, 20.0)}


def test_a_run_that_has_only_started_does_not_count():
    found = runs(World(gaps=(0.0,), noise=(0.0, 0.0)), np.random.default_rng(0))
    for steps, counts in ((20, True), (18, True), (17, False)):  # of 20
        cut = {**found, ("other 0", 1): _points(found["other 0", 1], range(steps))}
        (row,) = rows_of(["other 0"], cut, setting(share=0.3), _draws())
        assert (1 in row.seeds) == counts == (not row.left_out)


def _points(run: RunLosses, kept, trained: np.ndarray | None = None) -> RunLosses:
    kept = list(kept)
    domains = {name: replace(losses, nats=losses.nats[:, kept]) for name, losses in run.domains.items()}
    return replace(
        run,
        trained=run.trained[kept] if trained is None else trained,
        training=run.training[kept],
        domains=domains,
        copying=run.copying[: len(kept)],
    )


def test_runs_that_cannot_be_compared_say_why():
    world = World(gaps=(0.0, 0.0), noise=(0.0,) * 3, documents=60)
    found = runs(world, np.random.default_rng(0))
    for seed in range(3):
        losses = found["other 0", seed].domains["code"]
        found["other 0", seed].domains["code"] = replace(losses, tokens=losses.tokens + 1)
    first, second = rows_of(world.names, found, setting(), _draws())
    assert first.words == "it was evaluated on other documents than the reference" and second.gap is not None
    (broken,) = rows_of(["broken"], found, setting(failed=("broken",)), _draws())
    assert broken.words == "failed before an evaluation point with finite losses"
    without = {key: run for key, run in found.items() if key[0] != REFERENCE}
    rows = rows_of(world.names, without, setting(waiting=True), _draws())
    assert {row.words for row in rows} == {"the reference reference has not run yet"}


def test_ends_of_the_range_are_means_over_runs():
    world = World(gaps=(), noise=(0.0,), documents=400, taste=0.01)
    found = runs(world, np.random.default_rng(0))
    curves = list(draw(found, TRAIN, OOD, 10, _draws()).values())
    where = Range(low=final(curves), high=upper_end(curves, 0.5, BIGRAM))
    assert where.low[0] == pytest.approx(np.mean([one.x[0, -1] for one in curves]))
    assert where.high[0] == pytest.approx(np.mean([one.x[0, 9] for one in curves]))


def test_tokens_to_reach_follows_the_pace_of_the_second_half():
    tokens = np.array([1e5, 2e5, 3e5])
    assert tokens_to_reach(1.0, tokens, np.array([5.0, 4.0, 3.0])) == pytest.approx(5e5)
    assert tokens_to_reach(1.0, tokens, np.array([3.0, 3.0, 3.0])) is None
    assert tokens_to_reach(5.0 - LONGEST, tokens, np.array([5.0, 4.9, 4.8])) is None
    assert tokens_to_reach(1.0, tokens[:1], np.array([5.0])) is None
    long = np.arange(1, 21) * 1e3  # flat over the last three, as the learning rate has decayed there
    losses = 5 - np.log(np.minimum(long, 18e3))
    assert 20e3 < tokens_to_reach(losses[-1] - 1, long, losses) < 100e3


def test_tokens_that_a_short_run_needs_are_no_astronomic_number():
    """A run on a plateau: over the logarithm of its tokens it falls ever faster, not ever more slowly."""
    tokens = np.arange(1, 21) * 3e3
    losses = 3.3 - 0.1 * (tokens / tokens[-1]) ** 2
    assert tokens[-1] < tokens_to_reach(2.2, tokens, losses) < 10 * tokens[-1]


def test_one_bad_run_does_not_make_the_tokens_that_are_missing_none():
    """Two of three runs are below 3.5 already, their mean is not: it has to fall by 0.5 at 1 per 100,000 tokens."""
    falling = np.array([5.0, 4.0, 3.0])
    ends = [
        Curve(x=falling[None] + shift, y=np.zeros((1, 1, 3)), trained=np.array([1e5, 2e5, 3e5])) for shift in (0, 0, 3)
    ]
    assert more_tokens(ends, 3.5) == pytest.approx(5e4)
    assert more_tokens(ends, 3.5 - LONGEST * 3) is None


@pytest.mark.parametrize(
    ("world", "most"),
    [
        (World(gaps=(0.0,) * 5, noise=(0.12, 0.01, 0.02, 0.03, 0.05, 0.08)), 0),
        (World(gaps=(0.0,) * 5, noise=(0.04,) * 6, seeds=2, reference_seeds=2), 3),
    ],
    ids=["noisy reference, others differ", "looks"],
)
def test_intervals_hold(world, most):
    """A seeded part of tests/analysis/text/simulate.py: bounds leave room for what so few studies can show."""
    found = simulate(
        replace(world, documents=60), studies=25, seed=1, most=most, setting=setting(resamples=100, draws=4000)
    )
    assert found.rows.mean() >= 0.91 and found.rows.min() >= 0.84
    assert found.family <= 0.125 and found.wrong <= 0.1 and found.none == 0


def test_the_points_of_a_long_curve_are_means_of_neighbours_and_its_last_point():
    world = World(gaps=(0.1,), noise=(0.0, 0.0), points=2 * MOST_POINTS, seeds=2, reference_seeds=2)
    found = runs(world, _draws())
    run = found["other 0", 0]
    made = draw({("other 0", 0): run.shortened()}, TRAIN, OOD, 3, _draws())["other 0", 0]
    assert made.x.shape == (4, MOST_POINTS)
    assert made.trained[-1] == run.trained[-1]
    np.testing.assert_allclose(made.trained @ ([2] * (MOST_POINTS - 2) + [3, 1]), run.trained.sum())
    for curve_x, domain in ((made.x[0], TRAIN[0]), (made.y[0, 0], OOD[0])):
        losses = run.domains[domain]
        every = losses.nats.sum(0) / losses.tokens.sum()
        np.testing.assert_allclose(curve_x[[0, -1]], [every[:2].mean(), every[-1]])
    short = {key: _every_second(run) for key, run in found.items()}
    means = {key: run.shortened() for key, run in found.items()}
    rows = [rows_of(world.names, each, setting(), _draws())[0] for each in (means, short)]
    assert rows[0].gap.value == pytest.approx(rows[1].gap.value, abs=0.004)


def _every_second(run: RunLosses) -> RunLosses:
    domains = {name: replace(losses, nats=losses.nats[:, 1::2]) for name, losses in run.domains.items()}
    every = {"trained": run.trained[1::2], "training": run.training[1::2], "copying": run.copying[1::2]}
    return replace(run, **every, domains=domains)
