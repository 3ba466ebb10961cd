"""A run ends with the leak test of its model; an architecture that leaks gets no verdict."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from basecap.analysis import TextResults, analyse
from basecap.records import StudyRecords
from basecap.report import write_report
from basecap.report.text_summary import remarks
from basecap.testing.fresh_process import FreshProcess
from basecap.testing.trained_model import LeakTest
from tests.run._execute import run
from tests.small_study import small_study

FUTURE = "sees the future in held-out text: the loss at position 3 changes"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("leak-test")
    path, out = place / "tiny.yaml", place / "out"
    study = small_study(place / "text")
    study["train"] |= {"tokens": 512, "eval_every": 256}
    path.write_text(yaml.safe_dump(study))
    run(path, out)
    return out


@pytest.fixture
def finished(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "out"))


def results(out) -> TextResults:
    (found,) = analyse([out])
    assert isinstance(found, TextResults)
    return found


def test_every_run_is_tested_at_its_end(finished):
    found = results(finished)
    assert {one.leak_test for one in found.runs} == {"passed"}
    for one in StudyRecords(finished).runs():
        kept = one.info().leak_test
        assert (kept["leaks"], kept["moved"]) == ("", 0.0) and kept["shapes"] and kept["seconds"] < 60
    assert not [line for line in remarks(found) if "Leak test" in line]


@pytest.mark.parametrize(("ahead", "before"), [(1e9, 1), (-1.0, 2)], ids=["by the pace", "last point but one"])
def test_a_new_process_starts_before_the_end(ahead, before, trained, tmp_path, monkeypatch):
    points, begin = [], FreshProcess.__init__

    def started(process: FreshProcess) -> None:
        (own,) = (one for one in StudyRecords(tmp_path / "out").runs() if not one.finished)
        points.append({record.step for record in own.evals()})
        begin(process)

    monkeypatch.setattr(FreshProcess, "__init__", started)
    monkeypatch.setattr("basecap.run.leak_test.LONG", 0.0)
    monkeypatch.setattr("basecap.run.leak_test.AHEAD", ahead)
    run(trained.parent / "tiny.yaml", tmp_path / "out", ("train.tokens=1024",), only=("transformer++",))
    (own,) = StudyRecords(tmp_path / "out").runs()
    assert own.info().leak_test["fresh_process"]
    assert [len(steps) for steps in points] == [before]  # of four points; a pace is known from the second one on


def test_runs_of_earlier_versions_are_marked(finished):
    before = results(finished)
    for one in StudyRecords(finished).runs():
        one.write_info(replace(one.info(), leak_test={}))
    found = results(finished)
    assert {one.leak_test for one in found.runs} == {"not run"}
    assert found.comparisons == before.comparisons
    names = " and ".join(dict.fromkeys(one.name for one in found.runs))
    assert f"Leak test of the trained models not run: {names}." in remarks(found)


def test_what_is_not_fully_tested_is_not_proved(finished):
    before = results(finished)
    (name,), records = [row.name for row in before.comparisons], StudyRecords(finished)
    late = LeakTest(untested=["4 x 64 tokens: the 120 s of the test are over"]).record()
    for one in records.runs():
        one.write_info(replace(one.info(), leak_test=late))
    found = results(finished)  # the test suite proves what is built in
    assert found.comparisons == before.comparisons
    assert f"Leak test of {name} (seed 0) not complete: {late['untested'][0]}." in remarks(found)
    for one in records.runs():
        if one.info().name == name:
            one.write_info(replace(one.info(), plugins={"mine.py": "0" * 16}))
    (row,) = results(finished).comparisons
    reason = f"is not proved to see no future, as its leak test is not complete: {late['untested'][0]}"
    assert (row.verdict, row.gap) == ("none", None)
    assert row.words == f"it {reason}; only --allow-unproved gives it a verdict (leak test, seed 0)"
    records.write_environment(records.environment() | {"allowed_unproved": [name]})
    found = results(finished)
    assert found.comparisons == before.comparisons
    assert any(line.endswith("; it has a verdict as --allow-unproved says.") for line in remarks(found))


@pytest.mark.parametrize("leaking", ["the other", "the reference"])
def test_what_leaks_gets_no_verdict(finished, leaking):
    (name,) = [row.name for row in results(finished).comparisons]
    who = name if leaking == "the other" else "transformer++"
    for one in StudyRecords(finished).runs():
        if one.info().name == who:
            one.write_info(replace(one.info(), leak_test=LeakTest(leaks=FUTURE).record()))
    write_report([finished], finished)
    (row,) = json.loads((finished / "results.json").read_text())["studies"][0]["comparisons"]
    subject = "it" if leaking == "the other" else "the reference"
    assert (row["name"], row["verdict"], row["gap"]) == (name, "none", None)
    assert row["words"] == f"{subject} {FUTURE} (leak test, seed 0)"
    page = (finished / "report.html").read_text()
    assert FUTURE in page
