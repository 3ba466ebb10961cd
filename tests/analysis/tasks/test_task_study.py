"""Studies of tasks with known answers: accuracies, what is lost when the pattern changes, and what does not count."""

from dataclasses import replace

import pytest

from basecap.analysis import TaskResults, analyse
from basecap.errors import DataError
from basecap.records import StudyRecords
from tests.report.synthetic_tasks import answers, write_task_study

CELLS = ({"length": 64.0, "pairs": 4.0}, {"length": 128.0, "pairs": 8.0})
#: (training task, test task) -> share of right values.
MOVED = {("a", "a"): 1.0, ("a", "b"): 0.2, ("b", "b"): 0.9, ("b", "a"): 0.9}


def answer(architecture, train, test, cell, seed):
    return MOVED[train, test] - 0.1 * (cell["length"] > 64) * (train != test)


def analysed(path) -> TaskResults:
    (study,) = analyse([path])
    return study


def row(study, table, **place):
    (found,) = [one for one in getattr(study, table) if all(getattr(one, key) == value for key, value in place.items())]
    return found


@pytest.fixture
def study(tmp_path):
    def write(architecture_answer=answer, **changes):
        options = {"architectures": ("one",), "train": ("a", "b"), "cells": CELLS} | changes
        return write_task_study(tmp_path, architecture_answer, **options)

    return write


def test_accuracy_is_the_mean_over_cells_and_cases_are_counted_whole(study):
    found = analysed(study().path)
    moved = row(found, "tests", train="a", test="b")
    assert moved.accuracy.value == pytest.approx((0.2 + 0.1) / 2)
    assert moved.case_accuracy.value == pytest.approx((0.2**2 + 0.1**2) / 2)
    assert [cell.axis for cell in moved.cells] == list(CELLS)
    first = moved.cells[0]
    # Wilson's interval of 20 of 100 examples, not of 80 of 400 values
    assert (first.accuracy.low, first.accuracy.high) == pytest.approx((0.133367, 0.288829), abs=1e-5)
    assert first.examples == 100 and found.kind == "tasks"


def test_the_shortcut_index_is_what_is_lost_and_says_little_of_what_was_not_learnt(study):
    found = analysed(study().path)
    lost, gained = row(found, "shifts", train="a"), row(found, "shifts", train="b")
    assert lost.index.value == pytest.approx(0.85) and lost.verdict == "loses" and lost.cells == 2
    assert gained.index.value == pytest.approx(0.05) and gained.verdict == "untrained"
    assert [one.recalls for one in found.trained] == [True, False]
    (whole,) = found.shortcuts
    assert whole.index.value == pytest.approx(0.85) and whole.shifts == 1 and whole.recalls


def test_only_the_shifts_of_a_study_count_where_it_names_them(study):
    task = {"train": ["a", "b"], "test": ["a", "b"], "options": {}, "shifts": {"a": []}}
    found = analysed(study(task=task).path)
    assert [(one.train, one.test) for one in found.shifts] == [("b", "a")]
    assert len(found.tests) == 4 and found.shortcuts == []


@pytest.mark.parametrize(("there", "verdict"), [(1.0, "holds"), (0.94, "undecided"), (0.5, "loses")])
def test_verdicts_follow_the_interval_of_the_index(study, there, verdict):
    found = analysed(study(lambda _, train, test, *rest: 1.0 if train == test else there).path)
    assert {one.verdict for one in found.shifts} == {verdict}


def test_the_index_of_an_architecture_is_over_seeds_where_there_are_several(study):
    spread = {0: 0.0, 1: 0.01, 2: 0.02}
    found = analysed(study(lambda *place: 1.0 if place[1] == place[2] else 0.5 + spread[place[4]], seeds=spread).path)
    (whole,) = found.shortcuts
    assert whole.seeds == [0, 1, 2] and whole.shifts == 2 and whole.index.value == pytest.approx(0.49)
    assert row(found, "shifts", train="a").seeds == [0, 1, 2]


@pytest.mark.parametrize(
    ("checkpoint", "growth", "step"),
    [("best", (0.5, 1.0, 0.7), 100), ("best", (0.5, 0.7, 0.7), 100), ("last", (0.5, 1.0, 0.7), 150)],
    ids=["best", "the earlier of equal ones", "last"],
)
def test_one_evaluation_point_counts(study, checkpoint, growth, step):
    found = analysed(study(growth=growth, task={"train": ["a", "b"], "checkpoint": checkpoint}).path)
    assert {point.step for point in found.points} == {step}
    share = growth[step // 50 - 1]
    assert row(found, "tests", train="a", test="a").accuracy.value == pytest.approx(share)
    assert len(found.learning) == 2 * len(growth) and found.checkpoint == checkpoint


def test_points_with_missing_cells_do_not_count_and_shifts_are_over_common_cells(study):
    records = study()
    run = records.run("one on a", 0)
    run.append_evals(answers(150, "a", CELLS[0], 1.0) + answers(150, "a", CELLS[0], 1.0, prefix="validation_"))
    path = records.run("one on b", 0).path / "evals.jsonl"
    lines = [line for line in path.read_text().splitlines() if not ('"subset": "a"' in line and "128.0" in line)]
    path.write_text("".join(f"{line}\n" for line in lines))
    found = analysed(records.path)
    assert {point.name: point.step for point in found.points} == {"one on a": 100, "one on b": 100}
    shift = row(found, "shifts", train="b")
    assert shift.cells == 1 and shift.index.value == pytest.approx(0.0)
    assert len(row(found, "tests", train="b", test="a").cells) == 1


def test_a_better_point_that_lacks_a_new_test_is_passed_over_and_said(study):
    records = study(train=("a",), growth=(1.0, 0.5))
    records.run("one", 0).append_evals(record for cell in CELLS for record in answers(100, "new", cell, 0.3))
    (point,) = analysed(records.path).points
    assert (point.step, point.passed_over) == (100, True)


def test_without_a_test_on_it_the_own_pattern_is_judged_on_validation_examples(study):
    found = analysed(study(lambda *place: 1.0 if place[1] == place[2] else 0.4, train=("a",), test=("b",)).path)
    (trained,) = found.trained
    assert trained.recalls and trained.measured == "validation" and trained.own.value == 1.0
    assert row(found, "shifts", test="b").index.value == pytest.approx(0.6)
    assert found.names == ["one"]


def test_what_was_learnt_is_judged_in_the_cells_that_were_trained(study):
    records = study(lambda *place: 1.0 if place[1] == place[2] else 0.5, train=("a",), test=("a", "b"))
    beyond = {"length": 4096.0, "pairs": 4.0}
    found = [record for task in ("a", "b") for record in answers(100, task, beyond, 0.1)]
    records.run("one", 0).append_evals(found)
    found = analysed(records.path)
    assert not found.points[0].passed_over
    (trained,) = found.trained
    assert trained.own.value == 1.0 and trained.measured == "some" and trained.recalls
    assert row(found, "tests", test="a").accuracy.value == pytest.approx((1 + 1 + 0.1) / 3)
    assert row(found, "shifts", test="b").index.value == pytest.approx(0.5)


def test_regions_are_shares_of_what_is_read(study):
    found = analysed(study(test=("a", "b"), regions={"b": (0.6, 0.2, 0.1)}).path)
    moved = row(found, "tests", train="a", test="b")
    assert [region.value for region in moved.regions] == pytest.approx([0.6, 0.2, 0.1])
    assert row(found, "tests", train="a", test="a").regions == ()


def test_failed_and_unfinished_runs_are_reported_and_count_only_without_finished_ones(study):
    records = study(seeds=(0, 1))
    for name, seed, status in (("one on a", 1, "failed"), ("one on b", 0, "running"), ("one on b", 1, "running")):
        run = records.run(name, seed)
        run.write_info(replace(run.info(), status=status, message="the loss is not finite"))
    empty = records.run("one on a", 2)
    empty.write_info(replace(records.run("one on a", 0).info(), seed=2))
    found = analysed(records.path)
    assert row(found, "tests", train="a", test="a").seeds == [0]
    assert row(found, "tests", train="b", test="b").seeds == [0, 1]
    told = {(failure.name, failure.seed): failure.message for failure in found.failures}
    assert told[("one on a", 1)] == "the loss is not finite" and "no validation accuracy" in told[("one on a", 2)]
    assert found.waiting == [] and len(found.runs) == 5


def test_a_study_without_measurements_has_no_rows(tmp_path):
    found = analysed(write_task_study(tmp_path, answer, train=("a", "b"), seeds=()).path)
    assert found.tests == found.trained == found.shifts == []
    assert found.waiting == ["steady on a", "steady on b", "leaning on a", "leaning on b"]


def test_published_numbers_stand_beside_ours(study):
    values = [
        {"architecture": "one", "train": "a", "test": "b", "value": 22.37},
        {"architecture": "one", "train": "a", "value": 99.0},
        {"architecture": "one", "train": "a", "test": "b", "length": 128, "pairs": 8, "value": 12.0},
        {"architecture": "one", "train": "a", "test": "b", "length": 512, "pairs": 8, "value": 12.0},
        {"architecture": "other", "train": "a", "test": "b", "value": 50.0},
        {"architecture": "one", "train": "b", "value": None},
    ]
    found = analysed(study(published={"source": "a paper", "metric": "accuracy", "values": values}).path).published
    assert [one.difference for one in found.rows] == [
        pytest.approx(0.15 - 0.2237),
        pytest.approx(0.01),
        pytest.approx(0.1 - 0.12),
        None,
        None,
        None,
    ]
    assert [one.within for one in found.rows] == [False, True, True, None, None, None]
    assert found.rows[-1].published is None and found.rows[-1].value is not None
    assert found.rows[1].test == "a" and found.source == "a paper"


def test_damaged_records_are_named(study):
    records = study()
    run = records.run("one on a", 0)
    info = run.info()
    run.write_info(replace(info, task=None))
    with pytest.raises(DataError, match=r"run\.json is damaged at 'task' \(is missing\)"):
        analyse([records.path])
    run.write_info(replace(info, name="two on a"))
    with pytest.raises(DataError, match="belongs to 'two on a', which is not in the study"):
        analyse([records.path])
    StudyRecords(records.path).create({"name": "x", "architectures": [], "task": {"train": []}})
    with pytest.raises(DataError, match=r"study\.yaml is damaged at 'task\.train'"):
        analyse([records.path])
