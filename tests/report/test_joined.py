"""Several studies in one report: what is joined, how it correlates, what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from basecap.analysis import join
from basecap.analysis.correlations import Measure, spearman, within
from basecap.analysis.joined import Joined
from basecap.analysis.results import EvaluationResults, EvaluationRow
from basecap.analysis.rows import Estimate
from basecap.cli import app
from basecap.errors import ConfigError, DataError
from basecap.report.figures.costs import gap_against, pareto_front
from basecap.report.joined_section import (
    charted,
    front_sentences,
    joined_charts,
    joined_sentences,
    joined_sheets,
    measured,
)
from tests.report.made_up import row, run_row, study
from tests.report.synthetic import write_study

GAPS = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4, "e": 0.5, "f": 0.6}
SPEEDS = {"base": 100.0, "a": 200.0, "b": 400.0, "c": 300.0, "d": 50.0, "e": 40.0, "f": 60.0}


def measure(kind: str, values: dict[str, float], better: str = "lower") -> Measure:
    found = {key: Estimate(value=value, low=None, high=None) for key, value in values.items()}
    return Measure(name=kind, kind=kind, unit="tokens/s", better=better, source="here", values=found)


def entropy(values: dict[str, float]) -> EvaluationResults:
    """Return an evaluation of two runs, whose mean is `values`."""
    rows = [
        EvaluationRow(
            name=name, seed=seed, step=1, tokens=1, eval="entropy", subset="", metric="mean", value=value + shift, n=1,
            stderr=None, axis={},
        )
        for name, value in values.items()
        for seed, shift in enumerate((-1.0, 1.0))
    ]  # fmt: skip
    return EvaluationResults(name="entropy", unit="nats", better="neither", axes=[], rows=rows)


def one_study(**changes):
    runs = [
        run_row(name, 0, machines=["GPU"], tokens_per_s=speed, state_bytes=int(10 * speed))
        for name, speed in SPEEDS.items()
    ]
    scores = {name: 1.0 + 10 * gap for name, gap in GAPS.items()} | {"base": 1.0}
    rows = [row(name, gap, 0.05) for name, gap in GAPS.items()]
    settings = {"data": {"seq_len": 2048}}
    return study(*rows, runs=runs, evaluations=[entropy(scores)], settings=settings, **changes)


def test_gaps_scores_and_costs_of_the_same_architectures_are_joined(tmp_path):
    files = [tmp_path / "costs.json", tmp_path / "more.json"]  # of one device and load: they count as one
    rows = [
        {"architecture": "a in body", "attention": "slow", "decode_tokens_per_s": 5.0, "state_bytes": 7},
        {"architecture": "a in body", "attention": "fast", "decode_tokens_per_s": 6.0, "state_bytes": 7},
        {"architecture": "stranger", "decode_tokens_per_s": 9.0},
        {"architecture": "b", "note": "cannot run: out of memory"},
    ]
    for file, own in zip(files, (rows[1:], rows[:1]), strict=True):
        file.write_text(json.dumps({"environment": {"device": "GPU"}, "load": {"prompt": 3, "new": 2}, "rows": own}))
    other = study(row("a", 0.3, 0.1), name="other", names=["base", "a", "unknown"])
    found = join([one_study(), other], ["one", "two"], files)
    names = [(measure.name, measure.source) for measure in found.measures]
    assert names == [
        ("gap", "one"), ("gap", "two"), ("entropy mean", "one"), ("decoding", "GPU, prompt 3"),
        ("state", "GPU, prompt 3"), ("training", "runs of one on GPU, which they may share"),
    ]  # fmt: skip
    values = [{name: each.value for name, each in measure.values.items()} for measure in found.measures]
    assert values[0] == {"base": 0.0, **GAPS} and values[1] == {"base": 0.0, "a": 0.3}
    assert values[2] == pytest.approx({name: 1.0 + 10 * gap for name, gap in {"base": 0.0, **GAPS}.items()})
    assert values[3] == {"a": 6.0} and values[4] == {"a": 7} and values[5] == SPEEDS
    assert found.reference == "base" and found.names == ["base", *GAPS, "unknown"]
    assert measured(found) == charted(found) == ["base", *GAPS]
    (correlation,) = found.correlations
    assert correlation.architectures == 7 and correlation.value.value == pytest.approx(1.0)
    said = joined_sentences(found)[0]
    assert "rank correlation +1.00 over 7 architectures (95" in said and "a higher value goes with a larger gap" in said
    assert front_sentences(found)[-1] == "Gap against training (runs of one on GPU, which they may share): b, a, base."
    sheet, other = joined_sheets(found)
    assert (sheet.name, other.name) == ("joined", "correlations")
    assert [line[0] for line in sheet.rows] == ["base", *GAPS]


def test_the_state_of_a_sequence_needs_no_file_of_costs():
    found = join([one_study(), study(row("a", 0.3, 0.1), name="other", runs=[run_row("a", 0)])], ["one", "two"])
    state = next(measure for measure in found.measures if measure.name == "state")
    assert state.source == "one, a sequence of 2048 tokens in float32"
    assert {name: each.value for name, each in state.values.items()} == {n: 10 * speed for n, speed in SPEEDS.items()}
    assert {chart.partition("-against-")[2] for chart in joined_charts(found)} == {
        "1-training",
        "2-state",
        "3-entropy mean",
    }


def test_speeds_of_runs_that_shared_a_machine_unequally_are_no_cost():
    runs = [
        run_row(name, seed, machines=["GPU"], tokens_per_s=speed) for name, speed in SPEEDS.items() for seed in (0, 1)
    ]
    alike = join([replace(one_study(), runs=runs)], ["one"])
    runs[-1] = replace(runs[-1], tokens_per_s=2 * SPEEDS["f"])
    unlike = join([replace(one_study(), runs=runs)], ["one"])
    assert [measure.name for measure in alike.measures] == ["gap", "entropy mean", "training"]
    assert [measure.name for measure in unlike.measures] == ["gap", "entropy mean"]


def test_a_score_is_related_to_the_gap_of_its_own_study():
    first, second = study(row("a", 0.3, 0.1), name="other"), one_study()
    found = join([first, second], ["one", "two"])
    assert [correlation.gap for correlation in found.correlations] == ["gap, two"]
    drawn = joined_charts(found)["gap-against-3-entropy mean"]["datasets"]["data-0"]
    assert {spot["name"]: spot["y"] for spot in drawn} == {"base": 0.0, **GAPS}


def test_few_architectures_have_no_correlation():
    gaps, scores = {"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0}, {"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0}
    rows = [row(name, gap, 0.05) for name, gap in gaps.items()]
    runs = [run_row(name, 0) for name in scores]
    found = join([study(*rows, evaluations=[entropy(scores)], runs=runs)], ["one"])
    assert found.correlations[0].value is None
    assert joined_sentences(found) == [
        "Which evaluations go with the gap is not known yet: a correlation needs a gap and the evaluation of 7 or "
        "more architectures, and 4 have both; train more architectures, or join studies (basecap report DIR DIR --out "
        "DIR)."
    ]
    layers = entropy(scores)
    layers = replace(layers, rows=[replace(row, subset="layer 0") for row in layers.rows])
    alone = join([study(*rows, evaluations=[layers], runs=runs)], ["one"])
    assert not alone.correlations and joined_sentences(alone) == []
    (nothing,) = joined_sentences(replace(alone, measures=[]))
    assert nothing.startswith("No study has a gap")


def test_rank_correlations_agree_with_scipy_and_their_intervals_cover():
    from scipy import stats

    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 6, 12).astype(float), rng.normal(size=12)
    assert spearman(x, y).value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert spearman(x, np.zeros(12)) is None
    samples = [rng.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], 20).T for _ in range(40)]
    truth = 6 / np.pi * np.arcsin(0.25)  # Spearman's of a normal pair with correlation 0.5
    held = [(found := spearman(*pair)).low <= truth <= found.high for pair in samples]
    assert 34 <= sum(held) <= 40


def test_runs_of_one_architecture_correlate_whatever_sets_the_architectures_apart():
    """Entropy rises with the gap over architectures, and within each the run with the higher entropy has less."""
    rows = [replace(row(name, gap, 0.05), seeds=[0, 1], gaps=[gap + 0.01, gap - 0.01]) for name, gap in GAPS.items()]
    rows[0] = replace(rows[0], reference_seeds=[0, 1, 5], reference_gaps=[0.02, -0.02, 0.5])  # 5 has no entropy
    scores = {name: 1.0 + 10 * gap for name, gap in GAPS.items()} | {"base": 1.0}
    given = study(*rows, evaluations=[entropy(scores)], runs=[run_row(name, 0) for name in scores])
    found = join([given], ["one"])
    (correlation,) = found.correlations
    assert correlation.value.value == pytest.approx(1.0) and correlation.runs == 14
    x, y = np.array([0.02] + 6 * [0.01]), -np.ones(7)
    assert correlation.within.value == pytest.approx(x @ y / np.sqrt((x @ x) * (y @ y)))
    reach = 1.959964 / np.sqrt(14 - 7 - 2)
    assert np.arctanh(correlation.within.high) == pytest.approx(np.arctanh(correlation.within.value) + reach)
    assert joined_sentences(found)[1].startswith("Gap and entropy mean, one, over runs of the same architecture: ")
    two = join([given, replace(given, comparisons=[])], ["one", "two"]).correlations[1]
    assert two.gap == "gap, one" and two.within is None  # of other runs


def test_correlations_within_architectures_cover_and_need_enough_runs():
    rng = np.random.default_rng(2)
    covariance = [[1, -0.6], [-0.6, 1]]

    def sample() -> list[np.ndarray]:
        return [rng.normal(0, 9, 2) + rng.multivariate_normal([0, 0], covariance, n) for n in (2, 2, 3, 2, 4, 3, 3)]

    held = [(found := within(sample())).low <= -0.6 <= found.high for _ in range(400)]
    assert 366 <= sum(held) <= 392  # 95 % of 400, three standard errors to either side
    assert within(sample()[:4]) is None and within([]) is None
    assert within([group * [1, 0] for group in sample()]) is None


def test_the_pareto_front_and_its_chart():
    gap = measure("gap", {"base": 0.0, **GAPS})
    faster, smaller = measure("cost", SPEEDS, "higher"), measure("cost", SPEEDS)
    assert pareto_front(gap, faster) == ["b", "a", "base"]
    assert pareto_front(gap, smaller) == ["e", "d", "base"]
    whole = Joined(reference="base", names=["base", *GAPS], measures=[gap, faster], correlations=[])
    chart = gap_against(whole, gap, faster)
    rows = chart["datasets"]["data-0"]
    assert {each["name"]: each["front"] for each in rows}["c"] == "no" and len(rows) == 7
    shown = next(part["encoding"]["tooltip"] for part in chart["layer"] if "tooltip" in part["encoding"])
    assert [(part["title"], part["type"]) for part in shown] == [
        ("architecture", "nominal"), ("gap", "nominal"), ("interval", "nominal"), ("on the Pareto front", "nominal"),
        ("cost, tokens/s", "quantitative"),
    ]  # fmt: skip
    for alike in ({"a": 1.0}, {"a": 1.0, "b": 1.0}):
        assert gap_against(whole, gap, measure("cost", alike)) is None
        assert front_sentences(replace(whole, measures=[gap, measure("cost", alike)])) == []
    lines = [
        sum(layer["mark"]["type"] == "line" for layer in gap_against(whole, gap, replace(faster, kind=kind))["layer"])
        for kind in ("cost", "score")
    ]
    assert lines == [1, 0], "an empty layer is a warning in the browser's console"


@pytest.mark.parametrize(
    ("studies", "error"),
    [
        ([one_study(), one_study(reference="a")], "one compares with 'base' and two with 'a'; give studies with"),
        ([one_study(), study(reference="a")], "one compares with 'base' and two with 'a'; give studies with"),
        (
            [one_study(), study(names=["x"])],
            "one and two have no architecture in common; report each of them alone.",
        ),
    ],
)
def test_studies_that_cannot_be_joined_are_refused(studies, error):
    with pytest.raises(ConfigError, match=error):
        join(studies, ["one", "two"])


def test_a_file_of_costs_of_other_architectures_is_refused(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text('{"environment": {}, "rows": [{"architecture": "stranger", "tokens_per_s": 5.0}]}')
    with pytest.raises(ConfigError, match=r"costs.json has no cost of an architecture of these .* --only 'base'"):
        join([one_study()], ["one"], [file])


@pytest.mark.parametrize(
    "content", ["{", "[" * 100_000, "[]", '{"rows": 1}', '{"rows": [{"architecture": "a"}]}', None]
)
def test_a_file_of_costs_that_is_none_is_refused(content, tmp_path):
    write_study(tmp_path, architectures={"base": (1.0, 0.0)}, documents=5, checkpoints=2)
    file = tmp_path / "costs.json"
    if content is not None:
        file.write_text(content)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--costs", str(file)])
    assert isinstance(done.exception, DataError) and str(file) in str(done.exception)


def test_tables_into_a_file_are_refused_before_the_report_is_made(tmp_path):
    write_study(tmp_path, architectures={"base": (1.0, 0.0)}, documents=5, checkpoints=2)
    arguments = ["report", str(tmp_path), "--tables", str(tmp_path / "study.yaml")]
    done = CliRunner().invoke(app, arguments, standalone_mode=False)
    assert "study.yaml' is a file" in str(done.exception)
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "report.html").exists()
