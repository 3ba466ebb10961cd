"""The report of a study of tasks: what it says, its pictures, and that it is as safe and offline as any other."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from basecap.analysis import TaskResults, analyse
from basecap.analysis.results import to_json
from basecap.records import StudyRecords
from basecap.records.measured import Declaration, Record
from basecap.report import terminal_table, write_report
from basecap.report.export import sheets
from basecap.report.figures import capacity, cells, hardest_cells, matrix, regions
from basecap.report.task_summary import known_tasks, recall_reasons
from tests.report.synthetic import write_study
from tests.report.synthetic_tasks import answers, write_task_study
from tests.report.test_report import EVIL, Page

CELLS = tuple({"length": length, "pairs": pairs} for length in (64.0, 128.0) for pairs in (1.0, 4.0))
PUBLISHED = {
    "source": "arXiv 2410.15678, Table 1",
    "metric": "accuracy",
    "values": [
        {"architecture": "leaning", "train": "a", "test": "b", "value": 22.37},
        {"architecture": "leaning", "train": "a", "test": "a", "length": 64, "pairs": 4, "value": 99.9},
    ],
}


def answer(architecture, train, test, cell, seed):
    if architecture in ("weak", "near"):
        return 0.3 if architecture == "weak" else 1.0 if train == test else 0.94
    return 1.0 if architecture == "steady" or train == test else 0.2


def task_study(path, **changes) -> StudyRecords:
    options = {"architectures": ("steady", "leaning", "weak"), "train": ("a", "b"), "cells": CELLS, "growth": (1.0,)}
    return write_task_study(path, answer, **options | changes)


def studied(path, **changes) -> TaskResults:
    """Return the analysis of a study, which is then on disk too."""
    (found,) = analyse([task_study(path, **changes).path])
    StudyRecords(path).write_results(to_json([found]))
    return found


def page_of(path) -> tuple[Page, str]:
    """Write the report of a study; return its page, and what that says on one line."""
    page = Page(write_report([path], path).page)
    return page, re.sub(r"\s+", " ", page.text)


def printed(*paths) -> str:
    text = io.StringIO()
    Console(width=400, file=text).print(terminal_table(analyse(paths), paths))
    return text.getvalue()


def data(chart) -> list[dict]:
    return [row for rows in chart["datasets"].values() for row in rows]


def test_a_page_with_every_part(tmp_path):
    options = {"train": ("a",), "test": ("a", "b"), "regions": {"b": (0.7, 0.1)}}
    task_study(tmp_path, architectures=("leaning", "weak"), published=PUBLISHED, **options)
    page, said = page_of(tmp_path)
    assert not [attributes for _, attributes in page.tags if {"src", "href", "action", "data"} & set(attributes)]
    assert {"matrix-leaning", "regions-b", "cells-weak-a-a", "cells-weak-a-b", "learning-a"} <= set(page.charts)
    assert {"hardest-cells-a", "capacity-length-leaning-a-a", "capacity-pairs-leaning-a-a"} <= set(page.charts)
    for text in (said, printed(tmp_path)):
        for words in (
            "On the pattern it was trained on, leaning recalls 95 % or more of the queried values; weak does not "
            "(30.0 %). When the pattern changes, leaning loses up to 80.0 points.",
            "Below 95 % on the own pattern: weak (30.0 %).",
            "leaning loses most on b: 20.0 % there, 80.0 points",
            "Read most on b: region 1 of 2 by leaning (70.0 %)",
            "our intervals hold 2 of 2 published numbers; the largest difference is -2.4 points",
            "Where there is one run, an interval includes the variation over test examples",
        ):
            assert words in text
    assert re.search(r"leaning ?a ?4 KiB ?4 of 4 ?4 of 4 ?weak ?a ?4 KiB ?none of 4", said)
    assert re.search(r"leaning ?a ?loses \+80\.0 ?\d", said) and re.search(r"22\.37 ?20\.00 ?-2\.37 ?yes", said)


def test_the_terminal_shows_each_architecture_and_training_task(tmp_path):
    studied(tmp_path, seeds=(0, 1))
    text = printed(tmp_path)
    assert re.search(r"leaning +b +2 +20\.0 \(\d+\.\d … \d+\.\d\) ✗ +100\.0 \(\d+\.\d … 100\.0\)", text)
    assert re.search(r"weak +a +2 +30\.0 \(\d+\.\d … \d+\.\d\) … ", text) and "Where there is one run" not in text
    assert "On the pattern they were trained on, steady and leaning recall 95 % or more" in text
    assert "When the pattern changes, steady still recalls; leaning loses up to 80.0 points." in text


def test_a_matrix_has_ours_the_published_number_and_the_runs(tmp_path):
    study = studied(tmp_path, published=PUBLISHED, seeds=(0, 1, 2))
    (sheet,) = [sheet for sheet in sheets(study) if sheet.name == "published"]
    assert [row[4:6] for row in sheet.rows] == [[row.published, row.value] for row in study.published.rows]
    rows = {(row["train"], row["test"]): row for row in data(matrix(study, "leaning"))}
    assert len(rows) == 4
    moved = rows["a", "b"]
    assert (moved["ours"], moved["theirs"], moved["runs"]) == ("20.0", "paper 22.37", "3 runs")
    assert rows["b", "a"]["theirs"] == "" and rows["a", "a"]["theirs"] == "", "a published cell is not the mean"
    assert matrix(study, "unknown") is None
    small = replace(study, scale="test")
    assert not [sheet for sheet in sheets(small) if sheet.name == "published"]
    assert {row["theirs"] for row in data(matrix(small, "leaning"))} == {""}, "they belong to the published size"


def test_models_that_do_not_recall_are_not_compared_with_published_ones(tmp_path):
    published = PUBLISHED | {"values": [{"architecture": "weak", "train": "a", "test": "a", "value": 99.0}]}
    task_study(tmp_path, architectures=("weak",), published=published)
    _, said = page_of(tmp_path)
    assert "No architecture recalls" in said and "our intervals hold" not in said


def test_a_cross_of_the_paper_is_shown_and_compared_with_nothing(tmp_path):
    cross = {"architecture": "leaning", "train": "a", "test": "b", "value": None}
    study = studied(tmp_path, published=PUBLISHED | {"values": [cross, cross | {"length": 128, "pairs": 4}]})
    assert "paper ✗" in [row["theirs"] for row in data(matrix(study, "leaning"))]
    (row,) = [one for one in study.tests if (one.architecture, one.train, one.test) == ("leaning", "a", "b")]
    assert len(capacity(study, row, "length")["layer"]) == 3, "no diamond"
    _, said = page_of(tmp_path)
    assert 'trained on. "paper": the number of arXiv' in said and "✗ where that has a cross: not learned" in said
    assert "our intervals hold" not in said


def test_curves_stand_on_the_values_of_an_axis_with_a_line_per_value_of_the_other(tmp_path):
    study = studied(tmp_path, published=PUBLISHED)
    (row,) = [one for one in study.tests if one.architecture == "leaning" and one.train == one.test == "a"]
    chart = capacity(study, row, "length")
    x = chart["layer"][0]["encoding"]["x"]
    assert x["scale"]["type"] == "log" and x["axis"]["values"] == [64.0, 128.0]
    assert {(one["place"], one["line"]) for one in data(capacity(study, row, "length"))} == {
        (length, pairs) for length in (64.0, 128.0) for pairs in (1.0, 4.0)
    }
    assert [one["value"] for one in data(capacity(study, row, "pairs")) if "low" not in one] == [pytest.approx(0.999)]
    assert {one["text"] for one in data(cells(study, row))} == {"100"}


@pytest.mark.parametrize(
    ("grid", "drawn"),
    [(({},), set()), (({"length": 64.0}, {"length": 128.0}), {"capacity-length-one-a-a"})],
    ids=["no axis", "one axis"],
)
def test_what_a_grid_does_not_vary_over_is_not_drawn(tmp_path, grid, drawn):
    task_study(tmp_path, architectures=("one",), train=("a",), cells=grid)
    page, said = page_of(tmp_path)
    assert set(page.charts) == {"matrix-one", "learning-a"} | drawn
    assert "This study tests on the trained pattern only." in said and "Shortcut index" not in said


def test_architectures_stand_side_by_side_in_the_hardest_cells(tmp_path):
    study = studied(tmp_path)
    rows = data(hardest_cells(study, "a"))
    found = {(row["name"], row["place"], row["value"]) for row in rows}
    assert found == {
        (name, pairs, value)
        for name, value in (("steady", 1.0), ("leaning", 1.0), ("weak", 0.3))
        for pairs in (1.0, 4.0)
    }
    assert hardest_cells(study, "unknown") is None


def test_a_few_answers_name_no_region_and_tasks_that_basecap_has_are_explained(tmp_path):
    study = studied(tmp_path, architectures=("one",), train=("mqar", "b"), regions={"b": (0.3, 0.1)})
    assert not any(reason.startswith("Read most") for reason in recall_reasons(study))
    assert [name for name, _ in known_tasks(study)] == ["mqar"]


def test_a_model_that_fails_in_cells_that_it_was_not_trained_in_is_named(tmp_path):
    records = task_study(tmp_path, architectures=("steady",), train=("a",), cells=CELLS[:2])
    records.run("steady", 0).append_evals([row for cell in CELLS[2:] for row in answers(50, "a", cell, 0.2)])
    _, said = page_of(tmp_path)
    assert "also those not trained in: steady 60.0 % (lowest 20.0 %, length 128, pairs 1)." in said


def test_bars_end_at_one_and_name_what_is_read_from_no_region(tmp_path):
    study = studied(tmp_path, architectures=("one",), regions={"b": (0.5, 0.2, 0.1)})
    rows = [row for row in data(regions(study, "b")) if row["name"] == "one on a"]
    assert [row["region"] for row in rows] == ["1", "2", "3", "none of them"]
    assert [row["value"] for row in rows] == pytest.approx([0.5, 0.2, 0.1, 0.2]) and rows[-1]["to"] == pytest.approx(1)
    assert regions(study, "a") is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": ()}, "Nothing has been measured yet."),
        (
            {"architectures": ("weak",)},
            "No architecture recalls 95 % or more of the queried values on the pattern it was trained on "
            "(best accuracies: weak 30.0 %). "
            "What happens when the pattern changes says little in this case.",
        ),
        ({"train": ("a",), "test": ("b",), "cells": ({},)}, "validation examples"),
        ({"architectures": ("near",)}, "near on a is undecided on b: 94.0 % there, 6.0 points"),
    ],
    ids=["nothing yet", "none recalls", "own pattern not tested", "undecided"],
)
def test_poor_studies_still_make_a_page(tmp_path, changes, said):
    task_study(tmp_path, **{"architectures": ("steady",), "cells": CELLS[:1]} | changes)
    _, text = page_of(tmp_path)
    assert said in text and not re.search(r"\bnan\b|None", text.split("Settings")[0])


def test_names_from_outside_are_text_everywhere(tmp_path):
    values = [{"architecture": EVIL, "train": EVIL, "value": 50.0}, {"architecture": f"{EVIL}!", "value": 1.0}]
    published = {"source": EVIL, "metric": "accuracy", "values": values}
    records = task_study(
        tmp_path, architectures=("steady", EVIL), train=("a", EVIL), published=published, cells=CELLS[:1]
    )
    run = records.run(f"{EVIL} on a", 0)
    run.write_info(replace(run.info(), status="failed", message=f"{EVIL} [bold]broke[/bold]"))
    page = Page(write_report([tmp_path], tmp_path).page)
    assert "<script>alert" not in (tmp_path / "report.html").read_text() and page.text.count(EVIL) > 5
    assert len([tag for tag, _ in page.tags if tag == "script"]) == len(page.charts) + 2
    assert f"{EVIL} [bold]broke[/bold]" in printed(tmp_path)


def test_studies_of_text_and_of_tasks_stand_in_one_report(tmp_path):
    tasks = task_study(tmp_path / "tasks", architectures=("steady",), cells=CELLS[:1])
    tasks.write_declarations(
        [
            Declaration(name="recall", unit="share", better="higher"),
            Declaration(name="entropy", unit="nats", better="lower"),
        ]
    )
    other = Record(step=50, tokens=1, eval="entropy", subset="layer 1", metric="mean", value=0.5, n=10)
    tasks.run("steady on a", 0).append_evals([other])
    text = write_study(
        tmp_path / "text", architectures={"base": (1.0, 0.0), "steady": (1.0, 0.2)}, documents=5, checkpoints=2
    )
    paths = [text.path, tasks.path]
    page = Page(write_report(paths, tmp_path / "both").page)
    assert {"1-scatter-github", "2-matrix-steady", "2-entropy-mean"} <= set(page.charts)
    assert sum(tag == "h1" for tag, _ in page.tags) == 3
    said = printed(*paths)
    assert "limited-mini\nNothing can be compared with base yet" in said and "moved-patterns: accuracy in %" in said
