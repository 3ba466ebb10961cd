"""A study from Python shows what its report shows, and says in a sentence what is not there."""

import contextlib
import csv
import json
import re
import sys

import pytest

import basecap
from basecap.api import Study, TrainedModel
from basecap.errors import BasecapError, ConfigError
from basecap.report import write_report, write_tables
from basecap.report.bundle import label
from tests.report.synthetic import write_study
from tests.report.synthetic_tasks import write_task_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    out = tmp_path_factory.mktemp("studies") / "zoo"
    write_study(out, architectures={"base": (1.0, 0.0), "other": (1.0, 0.2)}, documents=60, seeds=(0, 1))
    return basecap.open(out)


def test_tables_and_figures_are_those_of_the_report(study, tmp_path):
    (study.path / "report.html").write_text(f'<script data-bundle="{label("draw()")}">draw()</script>')
    report = write_report([study.path], study.path)
    write_tables(report.studies, tmp_path)
    assert sorted(study.tables) == sorted(path.stem for path in tmp_path.glob("*.csv"))
    for name in study.tables:
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [[str("" if cell is None else cell) for cell in row.values()] for row in study.table(name)] == [
            list(row.values()) for row in rows
        ]
        assert study.table(name).columns == list(rows[0])
    chart = r'<div class="chart" data-name="(.*?)"><script type="application/json">(.*?)</script>'
    drawn = {name: json.loads(content) for name, content in re.findall(chart, report.page.read_text())}
    assert sorted(study.figures) == sorted(drawn)
    study.figure("gaps").chart["config"]["font"] = "Comic Sans"
    assert study.figure("gaps").chart["config"]["font"] == drawn["gaps"]["config"]["font"]
    saved = json.loads(study.figure("gaps").save(tmp_path / "gaps.json").read_text())
    assert saved["datasets"] == drawn["gaps"]["datasets"]
    assert study.table()[0]["verdict"] == report.studies[0].comparisons[0].verdict == "degrades"


def test_a_notebook_displays_tables_as_text_and_the_first_rows_of_long_ones(study):
    shown = study.table()._repr_html_()
    assert "<td" in shown and "degrades" in shown and "…" in shown
    assert f"{study.table()!r}".startswith("| architecture | verdict |")
    long = study.records()
    assert len(long) > 60 and f"{len(long) - 60} more rows" in long._repr_html_()
    assert study.run("other", seed=1).records()[-1] in long
    assert {"name", "seed", "tokens", "eval", "subset", "metric", "value"} <= long[0].keys() and "axis" not in long[0]


def test_tables_become_data_frames_where_pandas_is_installed(study, monkeypatch):
    pandas = pytest.importorskip("pandas")
    table = study.table("ranges")
    assert table.to_pandas().equals(pandas.DataFrame(table)) and len(table.to_pandas()) == len(table) == 1
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pandas is not installed; install it with pip install pandas"):
        table.to_pandas()


def open_here(directory):
    with contextlib.chdir(directory):
        basecap.open(".")


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda study: study.figure("gap"), "zoo has no figure 'gap'; did you mean 'gaps'?"),
        (lambda study: study.table("verdict"), "zoo has no table 'verdict'; did you mean 'verdicts'?"),
        (lambda study: study.run("othr"), "zoo has no run of 'othr'; did you mean 'other'?"),
        (lambda study: study.run("other", "0"), "with seed '0'; give 0 or 1."),
        (lambda study: study.run("other", 7), "zoo has no run of other with seed 7; give 0 or 1."),
        (lambda study: study.figure("gaps").save("gaps.png"), "written as .svg, .pdf or .json; give gaps.png one of"),
        (lambda study: basecap.open(study.path / "runs" / "other-s0"), "holds no study (no study.yaml); did you mean"),
        (lambda study: basecap.open(study.path.parent), "zoo'?"),
        (lambda study: open_here(study.path.parent), ". holds no study (no study.yaml); did you mean 'zoo'?"),
        (lambda study: basecap.open("nowhere"), "nowhere holds no study (no study.yaml); give the directory of"),
        (lambda study: basecap.load(study.path / "runs" / "othr-s0"), "is not the directory of a run; did you mean"),
        (lambda study: basecap.load(study.path, plugins="x.py"), "plugins is one file; give a list, plugins=['x.py']."),
        (lambda study: basecap.load(study.path), "zoo is a study; give one of its runs, such as "),
        (lambda study: study.run("other").model(), "has no checkpoint; give the directory of a trained run."),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(study, ask, sentence):
    with pytest.raises(BasecapError) as caught:
        ask(study)
    assert sentence in str(caught.value)


def test_a_gap_that_cannot_be_measured_yet_says_why(tmp_path):
    write_study(tmp_path, architectures={"base": (1.0, 0.0), "other": (1.0, 0.2)}, documents=40, checkpoints=3)
    study = basecap.open(tmp_path)
    with pytest.raises(ConfigError) as caught:
        study.figure("gaps")
    assert [row["gap low"] for row in study.table()] == [None]
    assert str(caught.value) == f"{tmp_path} has nothing to show in the figure 'gaps': {study.summary.headline}"


def test_to_see_a_gap_is_a_look_at_the_study_and_to_open_it_is_none(tmp_path):
    records = write_study(tmp_path, architectures={"base": (1.0, 0.0), "other": (1.0, 0.2)}, documents=40)
    study = basecap.open(tmp_path)
    assert study.runs and records.tables() is None
    assert study.table() and records.tables() is not None


def test_a_study_of_tasks_has_its_accuracies_and_its_models_read_no_text(tmp_path):
    write_task_study(tmp_path, lambda *cell: 0.9, architectures=["steady"])
    study = basecap.open(tmp_path)
    assert study.table().name == "accuracy" and study.figures and all(study.figure(name) for name in study.figures)
    run = study.runs[0]
    with pytest.raises(ConfigError, match="trained on a task, whose tokens are no text"):
        _ = TrainedModel(run.info.name, 0, 1, None, None).tokenizer
