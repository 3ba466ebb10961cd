"""When a comparison comes too early: the reference's transition, the drift of a gap, two sets of archived records."""

import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from basecap.analysis import analyse
from basecap.analysis.rows import Direction, Interval
from basecap.analysis.text.comparison import Comparison, compare_runs
from basecap.analysis.text.losses import RunLosses
from basecap.analysis.text.maturity import (
    DIRECTION_LEVEL,
    PAST,
    SETTLED,
    STARTED,
    directions,
    maturity_of,
    runs_to_settle,
    with_state,
)
from basecap.records import StudyRecords
from tests.analysis.text.made_up import REFERENCE, World, runs, setting
from tests.analysis.text.simulate_one_run import Design, table_of
from tests.report.made_up import gap

RESULTS = Path(__file__).resolve().parents[3] / "results"
WORLD = World(gaps=(0.0, 0.3), noise=(0.0,) * 3, documents=400, taste=0.01, wobble=0.002)


def copying(*shares: float) -> RunLosses:
    """Return a run that copies so much at evenly spaced points, NaN where that was not measured."""
    count = len(shares)
    return RunLosses(
        trained=np.arange(1, count + 1) * 10_000_000,
        training=np.full(count, 3.0),
        domains={},
        copying=np.array(shares),
    )


def compare(shares: np.ndarray | None, world: World = WORLD) -> Comparison:
    """Compare made-up runs whose reference copies so much."""
    found = runs(world, np.random.default_rng(0))
    changed = {key: replace(run, copying=shares) for key, run in found.items() if key[0] == REFERENCE}
    return compare_runs(world.names, {**found, **changed}, setting(), np.random.default_rng(0))


NAN = float("nan")


@pytest.mark.parametrize(
    ("shares", "state", "said"),
    [
        ([0.01, 0.3, 0.34, 0.35], "mature", "copies 30 % where the trained range begins, 35 % at its end"),
        ([0.01, SETTLED * 0.4 + 1e-3, 0.35, 0.4], "mature", "past its transition"),
        ([0.01, SETTLED * 0.4 - 1e-3, 0.35, 0.4], "early", "learns to copy within the trained range (30 %"),
        ([0.0, 0.01, 0.02, PAST - 1e-3], "early", "has started to copy (9.9 % at its end)"),
        ([0.09, 0.09, 0.09, 0.09], "early", "has started to copy (9.0 %"),  # it stands still, and hardly copies
        ([0.0, 0.0, 0.0, -0.01], "maturity unknown", "no transition: it copies nothing after 40 million tokens"),
        ([0.0, 0.0, 0.0, STARTED - 1e-3], "maturity unknown", "no transition: it copies 1.9 % after 40 million tokens"),
        (
            [NAN, NAN, NAN, 0.05],
            "early",
            "train about 60 million more tokens: the reference has started to copy",
        ),
        ([NAN, NAN, NAN, 0.35], "maturity unknown", "not measured near 20 million tokens"),
        ([NAN, NAN, NAN, NAN], "maturity unknown", "evaluate copying at every evaluation point"),
    ],
)
def test_a_reference_is_mature_past_its_transition(shares, state, said):
    found = maturity_of([copying(*shares)], 0.5, 40_000_000.0, None)
    assert found.state == state and said in found.words


def test_runs_without_copying_do_not_count_beside_others():
    some = [copying(0.01, 0.3, 0.34, 0.35), copying(NAN, NAN, NAN, 0.9), replace(copying(0.0), copying=None)]
    assert maturity_of(some, 0.5, 40_000_000.0, None).state == "mature"


def test_a_reference_of_which_some_runs_never_copy_is_early():
    """On average it copies as much where the range begins as at its end, and half of its runs have not begun."""
    mixed = [copying(*[share] * 4) for share in (0.4, 0.4, 0.0, PAST)]
    found = maturity_of(mixed, 0.5, 40_000_000.0, None)
    assert found.state == "early" and found.copying.end == found.copying.begin > 2 * PAST
    assert found.words == "train longer: 1 of 4 runs of the reference copies less than 10 % at the end"
    assert maturity_of([mixed[0], mixed[3], copying(*[NAN] * 4)], 0.5, 40_000_000.0, None).state == "mature"


def test_the_tokens_that_are_missing_follow_from_where_the_transition_began():
    """It starts after 20M tokens and takes 2.4 times as many; half of the run must come after that."""
    found = maturity_of([copying(0.0, STARTED, 0.1, 0.2, 0.25, 0.3)], 0.5, 60_000_000.0, None)
    assert found.state == "early" and found.started == pytest.approx(20e6)
    assert found.more == pytest.approx(2 * 2.4 * 20e6 - 60e6)


def test_no_row_has_a_verdict_before_the_reference_is_mature():
    mature = compare(np.linspace(0.3, 0.35, 20))
    assert [row.verdict for row in mature.rows] == ["keeps", "degrades"] and mature.maturity.state == "mature"
    for shares, state in ((np.linspace(0.0, 0.35, 20), "early"), (None, "maturity unknown")):
        young = compare(shares)
        for row, other in zip(young.rows, mature.rows, strict=True):
            every = [row, row.gap, row.weighted, *row.domains]
            assert {one.verdict for one in every} == {state} and row.gap.alone == state
            assert (row.gap.value, row.gap.high) == (other.gap.value, other.gap.high)
            assert young.maturity.words in row.words


def test_a_row_that_is_behind_is_early_where_the_reference_is():
    """One remedy for the whole table: what the reference needs."""
    slow = replace(WORLD, gaps=(0.0,), speeds=(1.0, 0.4))
    (early,), (behind,) = (compare(shares, slow).rows for shares in (np.linspace(0.0, 0.35, 20), None))
    assert (early.verdict, behind.verdict) == ("early", "behind")
    assert early.words.startswith("too early; ") and early.words.endswith(behind.words)


def test_a_mixed_study_has_no_maturity():
    found = compare_runs(WORLD.names, runs(WORLD, np.random.default_rng(0)), setting(ood=()), np.random.default_rng(0))
    assert found.maturity is None and {row.verdict for row in found.rows} == {"none"}
    assert {row.gap.direction for row in found.rows} == {None}


@pytest.mark.parametrize(("drift", "words"), [(0.0, "keeps"), (0.25, "early"), (-0.5, "keeps")])
def test_a_gap_that_drifts_across_the_tolerance_is_early(drift, words):
    """The world has no gap in the middle of its range, and `drift` nats more per nat of held-out loss."""
    world = replace(WORLD, gaps=(0.0,))
    found = runs(world, np.random.default_rng(0))
    for seed in range(3):
        run = found["other 0", seed]
        x = run.domains["prose"].nats.sum(0) / run.domains["prose"].tokens.sum()
        middle = (x[9] + x[-1]) / 2
        for domain in ("code", "forum"):
            run.domains[domain].nats[:] += run.domains[domain].tokens[:, None] * drift * (middle - x)
    (row,) = compare_runs(world.names, found, setting(), np.random.default_rng(0)).rows
    width = row.range[1] - row.range[0]
    assert row.gap.direction.drift.value == pytest.approx(drift * width / 2, abs=0.003)
    assert row.gap.direction.next.value == pytest.approx(row.gap.value + drift * width, abs=0.006)
    assert row.verdict == words
    assert (row.gap.direction.state == "drifts") == (words == "early") == ("the gap drifts out of" in row.words)


def direction(drift: float, error: float, following: float, reach: float) -> Direction:
    """Return a direction with intervals of these half-widths."""
    ends = [(value, value - half, value + half) for value, half in ((drift, error), (following, reach))]
    moved, after = (Interval(value=value, low=low, high=high) for value, low, high in ends)
    return Direction(now=0.0, drift=moved, next=after)


@pytest.mark.parametrize(
    ("word", "drift", "error", "following", "reach", "state"),
    [
        ("keeps", 0.0, 0.02, 0.0, 0.05, "settled"),
        ("keeps", 0.02, 0.01, 0.12, 0.05, "drifts"),
        ("keeps", 0.02, 0.03, 0.12, 0.05, "open"),  # too little is known of its drift
        ("keeps", 0.02, 0.01, 0.08, 0.05, "open"),  # the next range need not be above the tolerance
        ("keeps", -0.2, 0.01, -0.4, 0.05, "settled"),  # away from both
        ("degrades", 0.3, 0.01, 0.9, 0.05, "settled"),  # away from both
        ("degrades", -0.05, 0.01, 0.05, 0.05, "drifts"),
        ("degrades", -0.05, 0.1, 0.05, 0.05, "open"),
        ("undecided", 0.3, 0.01, 0.9, 0.05, None),
    ],
)
def test_what_a_drift_means_for_a_verdict(word, drift, error, following, reach, state):
    assert with_state(direction(drift, error, following, reach), word, 0.1).state == state


@pytest.mark.parametrize(("runs", "reference"), [(2, 4), (8, 4), (8, 8)])
def test_intervals_of_drifts_hold(runs, reference):
    """In nine rows of ten: noise differs between architectures as measured, and the reference's runs differ most."""
    design, rng, held = Design([runs] * 10, reference, spread=4, factor=1.5), np.random.default_rng(0), []
    for _ in range(100):
        found = table_of(design.draw(rng), 1000, DIRECTION_LEVEL).estimate(np.ones(1))
        held += [one.drift.low <= 0 <= one.drift.high for one in directions(found, found, found)]
    assert 0.88 < np.mean(held) < 0.935


def test_more_runs_tell_where_a_gap_goes():
    """An interval of 0.1 that must end 0.05 away takes four times the runs."""
    found = gap(0.0, 0.05, direction=direction(0.0, 0.1, 0.05, 0.1))
    assert runs_to_settle(found, 3) == 9
    assert runs_to_settle(replace(found, direction=direction(0.0, 0.1, 0.099, 0.1)), 3) is None


def unpack(archives: list[Path], out: Path) -> Path:
    """Unpack records; return their directory."""
    for path in archives:
        with tarfile.open(path) as archive:
            archive.extractall(out, filter="data")
    return out


def test_limited_zoo_is_early_in_every_row(tmp_path):
    """Its 98 runs of 60M tokens end within the reference's transition: 3.2 % of copying, measured at the end only."""
    path = unpack(sorted((RESULTS / "limited-zoo").glob("records-*.tar.xz")), tmp_path)
    (found,) = analyse([path])
    assert len(found.runs) == 98 and len(found.comparisons) == 13
    for row in found.comparisons:
        parts = [] if row.gap is None else [row.gap, row.weighted, *row.domains]
        assert {row.verdict, *(part.verdict for part in parts), *(part.alone for part in parts)} == {"early"}
        assert "train about 90 million more tokens: the reference has started to copy (3.2 % at its end)" in row.words


@pytest.fixture(scope="module")
def longer(tmp_path_factory) -> Path:
    """The records of the eight longer runs."""
    return unpack([RESULTS / "limited-zoo-300M" / "records.tar.xz"], tmp_path_factory.mktemp("longer"))


#: The words after 165M tokens; before 150M tokens every row is early (results/intervals/maturity-expected.md).
WORDS = {
    "rwkv-7": "undecided",
    "deltanet": "undecided",
    "mamba-2": "degrades",
    "gated-deltanet": "undecided",
    "top1-chunk-exact": "undecided",
    "transformer++ window": "degrades",
}


def test_longer_runs_are_early_first_and_mature_later(longer):
    """The same runs cut ever earlier; last where the held-out loss of the reference has risen again."""
    states = {}
    for tokens in (300, 166, 136, 91):
        for run in StudyRecords(longer).runs():
            later = [record.step for record in run.evals() if record.tokens > 1e6 * tokens]
            if later:
                run.rewind(min(later))
        (found,) = analyse([longer])
        states[tokens] = found.maturity.state
        words = {row.name: row.verdict for row in found.comparisons}
        if tokens == 300:
            assert found.maturity.rises == pytest.approx(225e6, rel=0.01)
            said = "the reference's loss on unseen domains does not fall while it trains; train on more text"
            assert all(row.words.startswith(said) for row in found.comparisons if row.gap)
        if tokens == 166:
            assert words == WORDS and found.maturity.passed == pytest.approx(76e6, rel=0.01)
        if tokens < 140:
            assert set(words.values()) == {"early"}
    assert states == {300: "mature", 166: "mature", 136: "early", 91: "early"}


def test_runs_of_the_reference_that_copy_late_make_a_study_early(tmp_path):
    """Of limited-zoo after 150M tokens: two runs of the reference are past the transition, eight on average are not."""
    archives = RESULTS / "limited-zoo-150M"
    path = unpack([archives / "records-reference-1.tar.xz", archives / "records-mamba-2.tar.xz"], tmp_path)
    late = [path / "runs" / f"transformer++-s{seed}" for seed in (2, 3)]
    for run in late:
        run.rename(tmp_path / run.name)
    (found,) = analyse([path])
    assert found.maturity.state == "mature"
    assert {row.name: row.verdict for row in found.comparisons if row.gap} == {"mamba-2": "degrades"}
    unpack([archives / "records-reference-2.tar.xz"], tmp_path)
    for run in late:
        (tmp_path / run.name).rename(run)
    (found,) = analyse([path])
    assert found.maturity.state == "early" and found.maturity.more == pytest.approx(22e6, rel=0.05)
    assert {row.verdict for row in found.comparisons if row.gap} == {"early"}
