"""The studies of the second paper and our own on recall: planned at every scale, each kind of figure at test scale."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from basecap.analysis import TaskResults, analyse
from basecap.errors import ConfigError
from basecap.plan.checks import check
from basecap.plan.runs import Cost, RunSpec, costs, plan_runs
from basecap.records import StudyRecords
from basecap.report import write_report
from basecap.report.charts import task_charts
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.run.start import selected_runs
from basecap.study.architectures import ArchitectureEntry
from basecap.study.config import StudyConfig, load_study, select, with_named
from basecap.study.merge import held_study, merge_studies
from basecap.study.study_file import library, read_study

STUDIES = [name for name in library() if name.startswith(("lp-", "recall-"))]
SCALES = ("paper", "gpu", "laptop", "test")
FIGURES = ("1", "4", "6a", "6b", "8", "9", "10", "11")

#: Costs of models that several studies have.
_costs: dict[str, Cost] = {}


def known_costs(runs: Sequence[RunSpec]) -> list[Cost]:
    """Return the cost of each run, or of another run of the same model."""
    models = [(run, run.model.model_dump_json()) for run in runs]
    return [_costs.get(model) or _costs.setdefault(model, costs([run])[0]) for run, model in models]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_planned_at_every_scale(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("basecap.plan.checks.costs", known_costs)
    for scale in SCALES:
        study = load_study(name, scale=scale)
        assert all(found.parameters > 0 and found.flops > 0 for found in known_costs(check(study).runs))
        assert study.evals and study.title == f"{name} at scale {scale}"
        entries = {entry.name for entry in study.architectures}
        assert study.reference in entries
        for value in study.published.values if study.published else ():
            assert value.architecture in entries
            assert value.train in study.task.train and value.test in study.task.tested


def test_there_is_a_study_of_every_figure_and_table_and_it_says_so():
    for number in FIGURES:
        assert re.search(rf"Figure {number} of arXiv 2410\.15678", read_study(f"lp-figure-{number}")["summary"])
    for number in (1, 2, 3, 4):
        assert f"Table {number} of arXiv 2410.15678" in read_study(f"lp-table-{number}")["summary"]


def test_the_published_grid_and_numbers_are_those_of_the_paper():
    tables = {number: load_study(f"lp-table-{number}") for number in (1, 2, 3)}
    cells = {task: len(study.task.training(task)) for study in tables.values() for task in study.task.train}
    assert [cells[task] for task in ("mqar", "mqar-last", "mqar-shuffle")] == [26] * 3
    assert cells["mqar-k2v2"] == 18 and cells["mqar-k4v8-shuffle"] == 14
    run = plan_runs(tables[1], 20_020)[0]
    assert run.train.tokens == pytest.approx(4.19e9, rel=0.002)
    moved = {(value.train, value.test): value.value for value in tables[1].published.values}
    assert moved["mqar", "mqar-last"] == 15.44 and moved["mqar-last", "mqar"] == 82.64
    longer = {(value.train, value.test): value.value for value in tables[2].published.values}
    assert longer["mqar-k1v1", "mqar-k2v2"] == 0 and longer["mqar-k2v2", "mqar-k1v1"] == 66.82
    remedies = [value.value for value in tables[3].published.values]
    assert len(moved) == len(longer) == 9 and len(remedies) == 42 and remedies.count(None) == 9


def outcome(study: StudyConfig, place: Path) -> TaskResults:
    """Run a study and return its results."""
    infos = execute(study, place, only=select(study, ()), on=Resources(device="cpu"), plugins=(), log=lambda line: None)
    assert {info.status for info in infos} == {"finished"}
    (found,) = analyse([place])
    assert isinstance(found, TaskResults)
    assert f"<h1>{study.title}</h1>" in write_report([place], place).page.read_text(encoding="utf-8")
    return found


def test_matrices_regions_and_cells_are_drawn_of_a_card_with_a_mixer_that_is_named(tmp_path):
    study = with_named(load_study("recall-card", ["task.train=[mqar, mqar-k2v2]"], "test"), ["based linear"])
    found = outcome(study, tmp_path)
    pairs = {(row.architecture, row.train, row.test) for row in found.tests}
    assert pairs == {(a, b, c) for a in ("pythia", "based linear") for b in study.task.train for c in study.task.test}
    assert {len(row.regions) for row in found.tests} == {0, 4}
    charts = {kind for kind, drawn in task_charts(found).items() if drawn}
    assert {"matrices", "regions", "cells", "other_cells", "capacity", "evaluations"} <= charts


def test_layers_of_a_hybrid_are_measured_and_capacity_is_tested_beyond_the_training_length(tmp_path):
    settings = [
        "task.train=[mqar]",
        "task.test=[mqar]",
        "task.test_cells=[{length: 64, pairs: 2}, {length: 128, pairs: 2}]",
    ]
    study = load_study("recall-hybrids", settings, "test")
    chosen = [entry for entry in study.architectures if entry.name in ("pythia", "Top-1 in block 2")]
    found = outcome(study.model_copy(update={"architectures": tuple(chosen)}), tmp_path)
    assert {cell.axis["length"] for row in found.tests for cell in row.cells} == {64, 128}
    layers = {row.subset for one in found.evaluations for row in one.rows if row.name == "Top-1 in block 2"}
    assert layers == {f"layer {number}" for number in range(4)}


def test_each_skill_is_tested_by_itself(tmp_path):
    found = outcome(load_study("recall-skills", ["task.train=[parity, capo]"], "test"), tmp_path)
    assert [(row.train, row.test) for row in found.tests] == [("parity", "parity"), ("capo", "capo")]
    assert not found.shifts and not found.waiting
    (knowledge,) = found.evaluations
    assert {(row.name, row.subset) for row in knowledge.rows} == {("transformer++ on capo", "capo")}
    with pytest.raises(ConfigError, match=r"task\.cross is false and task.test lacks 'state-tracking-s5'; add it"):
        load_study("recall-skills", ["task.test=[parity]"], "test")


def test_only_takes_any_name_where_a_study_says_so():
    with pytest.raises(ConfigError, match="did you mean 'mamba-1'"):
        with_named(load_study("recall-card", scale="test"), ["mamba1"])
    with pytest.raises(ConfigError, match="study quickstart has no architecture 'ngram': did you mean 'ngram 6'"):
        with_named(load_study("quickstart"), ["ngram"])
    study = load_study("lp-table-2", scale="test")
    assert with_named(study, ["rwkv-7"]) is study
    with pytest.raises(ConfigError, match=r"no architecture 'rwkv-7'.* add --set any_architecture=true"):
        select(study, ["rwkv-7"], hint_at_set=True)
    with pytest.raises(ConfigError, match=r"no architecture 'rwkv-7': choose from mamba-1, pythia\.$"):
        select(study, ["rwkv-7"])


def test_an_architecture_of_another_plugin_may_be_in_the_directory(tmp_path):
    study, records = load_study("quickstart"), StudyRecords(tmp_path)
    foreign = study.model_copy(
        update={"architectures": (*study.architectures, ArchitectureEntry(name="x", use="not loaded"))}
    )
    records.create(foreign.model_dump(mode="json"))
    whole = merge_studies(held_study(records), study, records.path)
    assert {run.architecture for run in selected_runs(records, whole, study, 256, {"based"})} == {"based"}
    assert whole == foreign
