"""The studies of the first paper: planned at every scale, each kind of figure drawn from runs at test scale."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from basecap.analysis import TextResults, analyse
from basecap.errors import ConfigError
from basecap.models.outline import outline
from basecap.plan import estimate
from basecap.plan.evaluation_work import decoding_memory, evaluation_work
from basecap.plan.prospects import sparse
from basecap.plan.runs import Cost, costs, plan_evaluations, plan_runs
from basecap.report import write_report
from basecap.report.export import sheets
from basecap.report.figures import paper
from basecap.report.scores import score_table
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.study.config import StudyConfig, load_study
from basecap.study.study_file import library, read_study
from tests.small_study import write_text

STUDIES = [name for name in library() if name.startswith("bc-")]
SCALES = ("paper", "gpu", "laptop", "test")
FIGURES = ("1a", "1b", "2a", "2b", "2c", "3a", "3b", "3c", "3d", "3e", "3f", "4", "6a", "6b", "7", "8", "9")
DOMAINS = {"commoncrawl", "c4", "arxiv", "book", "github", "stackexchange", "wikipedia"}
SELECTING = {"top1-element", "top1-chunk-exact", "top1-chunk-approx"}

#: Costs of runs that several studies have.
_costs: dict[str, Cost] = {}


def names(study: StudyConfig) -> set[str]:
    return {entry.name for entry in study.architectures}


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_planned_at_every_scale(name: str):
    for scale in SCALES:
        study = load_study(name, scale=scale)
        for run in plan_runs(study, study.data.vocab):
            if run.seed == study.seeds[0]:
                found = _costs.get(run.hash) or _costs.setdefault(run.hash, costs([run])[0])
                assert found.parameters > 0 and found.flops > 6 * 0.5 * found.tokens
        assert plan_evaluations(study) and bool(sparse(study)) == (scale == "test")
        assert study.figure is not None and study.title == f"{name} at scale {scale}"


def test_there_is_a_study_of_every_figure_and_table_and_it_says_so():
    for number in FIGURES:
        assert re.search(rf"Figure {number} of arXiv 2505\.18522", read_study(f"bc-figure-{number}")["summary"])
    for number in (1, 2, 3):
        assert f"Table {number} of arXiv 2505.18522" in read_study(f"bc-table-{number}")["summary"]


def test_architectures_and_regimes_are_those_of_the_paper():
    studies = {name: load_study(name) for name in STUDIES}
    mixed = {name for name, study in studies.items() if not study.data.ood}
    assert mixed == {f"bc-figure-{number}" for number in ("1a", "2a", "8", "9")}
    assert all(set(studies[name].data.train) == DOMAINS for name in (*mixed, "bc-mixed-new-domain"))
    assert studies["bc-mixed-new-domain"].data.ood == ("automathtext",)
    for name in ("bc-figure-7", "bc-table-3"):
        data = studies[name].data
        assert (data.ood, data.seq_len) == (("arxiv", "github", "automathtext"), 102400)
        assert data.min_ood_tokens == 100_000 and studies[name].train.checkpointing
        assert studies[name].train.forward_batch(1) == studies[name].train.forward_batch(8) == 1
    left_out = [studies[f"bc-leave-out-{domain}"].data for domain in sorted(DOMAINS)]
    assert [data.ood for data in left_out] == [(domain,) for domain in sorted(DOMAINS)]
    assert all({*data.train, *data.ood} == DOMAINS for data in left_out)
    for first, second in (("1a", "8"), ("2a", "9")):
        without, having = names(studies[f"bc-figure-{first}"]), names(studies[f"bc-figure-{second}"])
        assert having - without == {"top1-element"} and without < having
    assert names(studies["bc-figure-6b"]) - names(studies["bc-figure-2b"]) == SELECTING
    assert {studies[f"bc-figure-{number}"].model.hidden for number in ("2a", "2b", "2c", "6b", "9")} == {2048}
    (entropy,) = [entry for entry in studies["bc-figure-4"].evals if isinstance(entry, dict)]
    assert entropy["influence-entropy"]["length"] == 2048
    published = [study for study in studies.values() if study.figure and study.figure.published]
    assert len(published) == 6
    assert all(study.figure.published.values.keys() <= names(study) for study in published)


def test_downstream_scores_belong_to_the_published_size():
    columns = {"bc-table-1": 3, "bc-table-2": 14, "bc-figure-2c": 14, "lp-table-4": 4}
    for name, count in columns.items():
        evals, figure = load_study(name).evals, load_study(name).figure
        (asked,) = [entry["few-shot"] for entry in evals if isinstance(entry, dict)]
        measured = [column.split()[0] for column in figure.measured if column != "mean"]
        assert len(figure.measured) == count and measured == asked["tasks"]
        for scale in SCALES[1:]:
            assert "few-shot" not in str(load_study(name, scale=scale).evals)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("figure={kind: loss}", "figure.kind = 'loss'"),
        ("figure={kind: losses, x: [3, 2]}", "should be two numbers, the smaller one first"),
        ("figure={kind: losses, published: {source: a, values: {b: [1]}}}", "'b' should be pairs"),
        ("figure={kind: scores, columns: [c], published: {source: a, values: {b: [1, 2]}}}", "'b' should be 1 numbers"),
        ("figure={kind: scores, columns: [c, d], measured: [piqa acc]}", "measured should have 2 entries"),
        ("figure={kind: entropy, published: {source: a, values: {b: [1]}}}", "entropies has no published values"),
        ("figure={kind: losses, z: 1}", r"unknown key 'figure\.z'"),
    ],
)
def test_figures_that_cannot_be_drawn_are_refused(setting: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load_study("quickstart", [setting])


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> TextResults:
    """Return the results of bc-figure-4 at test scale, which hold what each kind of figure is drawn from."""
    place = tmp_path_factory.mktemp("bc")
    text = write_text(place / "text", documents=40, words=60)
    data = (
        f"data={{source: text, path: {text}, tokenizer: bytes, seq_len: 32, train: [prose], ood: [code], workers: 1}}"
    )
    study = load_study("bc-figure-4", [data, "model.hidden=16", "train.tokens=256", "train.eval_every=128"], "test")
    infos = execute(
        study, place / "out", only=names(study), on=Resources(device="cpu"), plugins=(), log=lambda line: None
    )
    assert {info.status for info in infos} == {"finished"}
    (found,) = analyse([place / "out"])
    assert isinstance(found, TextResults)
    page = write_report([place / "out"], place / "out").page.read_text(encoding="utf-8")
    assert 'data-name="bc-figure-4"' in page and "<h1>bc-figure-4 at scale test</h1>" in page
    assert "There are no published numbers to compare with." in page
    return found


def drawn(study: TextResults, figure: dict | None = None) -> tuple[dict, dict | None]:
    """Return the descriptions of our chart and of the published one."""
    settings = study.settings | ({"figure": figure} if figure else {})
    ours, theirs = paper(replace(study, settings=settings)).values()
    assert ours is not None
    return ours, theirs


def rows_of(chart: dict) -> list[dict]:
    return [row for rows in chart["datasets"].values() for row in rows]


def test_losses_are_drawn_over_the_smoothed_training_loss(analysed: TextResults):
    figure = {"kind": "losses", "x": [1.0, 2.0], "y": [1.0, 3.0]}
    figure["published"] = {"source": "a paper", "values": {"temperature 1": [[1.5, 2.5]], "unknown": [[1.0, 1.0]]}}
    ours, small = drawn(analysed, figure)
    _, theirs = drawn(replace(analysed, scale="paper"), figure)
    assert small is None and theirs, "published points are drawn beside runs of the published size only"
    rows, names_drawn = rows_of(ours), [entry["name"] for entry in analysed.settings["architectures"]]
    assert {row["name"] for row in rows} == set(names_drawn) and len(rows) == 2 * len(names_drawn)
    point = next(point for point in analysed.points if point.name == "temperature 8")
    assert {"x": point.training, "loss": point.loss_on("code")}.items() <= next(
        row for row in rows if (row["name"], row["tokens"]) == ("temperature 8", point.tokens)
    ).items()
    assert [(row["name"], row["x"], row["loss"]) for row in rows_of(theirs)] == [("temperature 1", 1.5, 2.5)]
    assert theirs["title"] == {"text": "published", "subtitle": ["a paper"]} and ours["title"] == "measured here"
    for chart, paper_axes in ((ours, False), (drawn(replace(analysed, scale="paper"), figure)[0], True)):
        encoding = chart["layer"][0]["encoding"]
        assert "smoothed training loss" in encoding["x"]["title"] and "mean of code" in encoding["y"]["title"]
        assert (encoding["x"]["scale"]["domain"] == [1.0, 2.0]) == paper_axes
    mixed = replace(analysed, ood_domains=[])
    assert {row["loss"] for row in rows_of(drawn(mixed, figure)[0])} == {point.held_out for point in analysed.points}


def test_entropies_are_drawn_over_the_temperature(analysed: TextResults):
    ours, theirs = drawn(analysed)
    rows = {row["name"]: row for row in rows_of(ours)}
    assert ours["title"] == "measured here, on 32 tokens"
    assert sorted(row["temperature"] for row in rows.values()) == [0.25, 0.5, 1, 2, 4, 8] and theirs is None
    assert rows["temperature 0.25"]["entropy"] < rows["temperature 8"]["entropy"] < 3.5  # nats of 32 places
    assert all(name == f"temperature {row['temperature']:g}" for name, row in rows.items())


def test_scores_are_our_numbers_beside_the_published_ones(analysed: TextResults):
    figure = load_study("bc-table-3").figure.model_dump(mode="json")
    published = [1, 1, *[None] * 6, 15.8, None, 49.8, 25.6, 16.2]
    figure["published"]["values"] = {"transformer++": published}
    small = replace(analysed, settings=analysed.settings | {"figure": figure})
    found = replace(small, scale="paper")
    table = score_table(found)
    assert paper(found) == {} and score_table(analysed) is None
    assert table and len(table.rows) == 7
    assert table.columns == [figure["columns"][column] for column in (0, 1, 8, 10, 11, 12)], "the others have no number"
    first, *others = table.rows
    assert (first.name, first.published) == ("transformer++", [1, 1, 15.8, 49.8, 25.6, 16.2])
    assert first.measured[0].value == 1 and first.measured[1:] == [None] * 5
    assert all(row.measured[0].value > 0 and row.published == [None] * 6 for row in others)
    (sheet,) = [sheet for sheet in sheets(found) if sheet.name == "scores"]
    heads = ["architecture", "training speed published", "training speed here", "standard error"]
    assert sheet.columns[:4] == heads and len(sheet.rows) == 7
    assert sheet.rows[0][:5] == ["transformer++", 1, 1.0, None, 1]
    assert not [sheet for sheet in sheets(analysed) if sheet.name == "scores"]
    (sheet,) = [sheet for sheet in sheets(small) if sheet.name == "scores"]
    assert sheet.columns == ["architecture", "training speed here", "standard error"], "published ones: of their size"


def test_table_3_shows_all_its_columns_measured(tmp_path: Path):
    text = write_text(tmp_path / "text", documents=40, words=60)
    data = (
        f"data={{source: text, path: {text}, tokenizer: bytes, seq_len: 64, train: [prose], ood: [code], workers: 1}}"
    )
    study = load_study("bc-table-3", [data, "model.hidden=16", "train.tokens=256", "train.eval_every=256"], "test")
    only = {"transformer++", "mamba-2"}
    out = tmp_path / "out"
    execute(study, out, only=only, on=Resources(device="cpu"), plugins=(), log=lambda line: None)
    report = write_report([out], out)
    (found,) = report.studies
    assert isinstance(found, TextResults)
    table = score_table(found)
    assert table and table.columns == ["training speed", "inference speed", "passkey 1k"]
    rows = {row.name: row.measured for row in table.rows if row.name in only}
    assert [score.value for score in rows["transformer++"][:2]] == [1, 1]
    for _, inference, accuracy in rows.values():
        assert inference.value > 0
        assert (accuracy.value, accuracy.low) == (0, 0) and accuracy.high == pytest.approx(32.44, abs=0.01)
    (passkey,) = [rows for rows in found.evaluations if rows.name == "passkey"]
    assert len(passkey.rows) == 2 * (1 + 4) and '"high": 0.324' in (out / "results.json").read_text()
    page = report.page.read_text(encoding="utf-8")
    assert all(f'data-name="passkey-{name}"' in page for name in only) and "0.0 to 32.4" in page
    assert "15.80" not in page and "they are not shown at scale test" in page


def test_only_the_length_of_100k_stands_beside_its_published_value():
    figure = load_study("bc-table-3").figure
    columns = zip(figure.columns, figure.measured, zip(*figure.published.values.values(), strict=True), strict=True)
    both = [name for name, measured, values in columns if measured and any(value is not None for value in values)]
    assert both == ["training speed", "inference speed", "passkey 100k"]


@pytest.mark.parametrize(
    ("name", "tokens", "time"),
    [
        ("bc-table-1", "few-shot reads 10,643,456", "1 min 13 s to"),
        ("bc-table-3", "passkey reads 114,688,000", "10 min"),
    ],
)
def test_the_plan_says_what_retrieval_takes_before_text_is_prepared(name: str, tokens: str, time: str):
    study = load_study(name)
    runs, evaluations = plan_runs(study, study.data.vocab)[:1], plan_evaluations(study)
    said = evaluation_work(runs, evaluations, {})
    assert any(f"{tokens} tokens at 1 evaluation point of a run" in sentence for sentence in said)
    assert not any("domain-loss" in sentence for sentence in said)
    found = _costs.get(runs[0].hash) or costs(runs)[0]
    rows = [{"architecture": runs[0].name, "PFLOP": found.flops / 1e15}]
    lines = [line for evaluation in evaluations for line in estimate._long(evaluation, runs, rows, {})]
    assert len(lines) == 1 and f"takes about {time}" in lines[0] and "an estimate" in lines[0]


def test_the_plan_says_what_memory_retrieval_takes():
    study = load_study("bc-table-3", ["architectures=[transformer++, mamba-2]"])
    runs, evaluations = plan_runs(study, 257), plan_evaluations(study)
    passkey, speed = decoding_memory(runs, evaluations)
    largest = max(8 * outline(run.model).state_bytes(102_400) for run in runs) / 2**30
    assert f"Memory of passkey: 8 decoding states of 102,400 tokens take up to {largest:.3g} GiB in fp32 (" in passkey
    assert passkey.endswith("read at once: 131,072 by transformer++, mamba-2.")  # eight prompts of 16,384
    assert speed.endswith("read at once: 409,600 by transformer++, mamba-2.")


def test_a_study_without_a_figure_draws_none(analysed: TextResults):
    assert paper(replace(analysed, settings=analysed.settings | {"figure": None})) == {}
