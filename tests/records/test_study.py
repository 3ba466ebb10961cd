"""The files of a study: nothing half written, nothing silently lost, every damage named."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from basecap.errors import ConfigError, DataError
from basecap.records import StudyRecords
from basecap.records.documents import DocumentLosses
from basecap.records.measured import Declaration, Record
from basecap.system.files import read_json
from tests.records.made_up import run_info

STUDY = {"name": "tiny", "data": {"train": ["prose"], "ood": ["code"]}, "train": {"lr": 1e-3}}


def record(step: int = 1, value: float = 2.0, **more) -> Record:
    fields = {"tokens": 10 * step, "eval": "domain-loss", "subset": "code", "metric": "loss", "n": 5}
    return Record(step=step, value=value, **(fields | more))


@pytest.fixture
def records(tmp_path) -> StudyRecords:
    found = StudyRecords(tmp_path)
    found.create(STUDY)
    return found


def test_a_study_is_read_back_and_written_where_it_differs(records):
    path = records.path / "study.yaml"
    before = path.stat()
    records.create(STUDY)
    assert records.study() == STUDY and path.stat().st_ino == before.st_ino
    records.create({**STUDY, "train": {"lr": 2e-3}})
    assert records.study() == {**STUDY, "train": {"lr": 2e-3}}


def test_one_process_at_a_time_runs_a_study(records):
    taken = pytest.raises(ConfigError, match="another process is running this study in")
    with records.locked(), taken, records.locked():
        pass
    with records.locked():
        assert records.study() == STUDY


@pytest.mark.parametrize("name", ["report.html", "notes", "runs"])
def test_a_directory_of_something_else_is_refused(tmp_path, name):
    for ours in {"data", "runs"} - {name}:
        (tmp_path / ours).mkdir()
    assert not StudyRecords(tmp_path).has_study
    StudyRecords(tmp_path).refuse_foreign()
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"{name} was not written by basecap"):
        StudyRecords(tmp_path).create(STUDY)
    assert not (tmp_path / "study.yaml").exists()


def test_runs_copied_from_another_study_are_no_foreign_files(tmp_path):
    records = StudyRecords(tmp_path)
    records.run("a", 0).write_info(run_info("a"))
    records.create(STUDY)
    mine = StudyRecords(tmp_path / "other")
    (mine.path / "runs" / "notes").mkdir(parents=True)
    with pytest.raises(ConfigError, match="runs was not written by basecap"):
        mine.create(STUDY)


def test_a_report_replaces_no_foreign_file(records):
    records.refuse_foreign_report()
    path = records.path / "elsewhere"
    StudyRecords(path).refuse_foreign_report()
    StudyRecords(path).write_report("ours", {})
    with pytest.raises(ConfigError, match=r"report\.html was not written by basecap"):
        StudyRecords(path).refuse_foreign_report()
    StudyRecords(path).write_results({"value": 1})
    StudyRecords(path).refuse_foreign_report()


def test_a_file_is_no_directory_of_a_study(records):
    path = records.path / "file"
    path.write_text("mine")
    for refuse in (StudyRecords(path).refuse_foreign_report, lambda: StudyRecords(path).create(STUDY)):
        with pytest.raises(DataError, match="file is a file; give a directory"):
            refuse()
    with pytest.raises(ConfigError, match="holds no study"):
        StudyRecords(path).study()
    with pytest.raises(DataError, match="File exists; fix that or give another directory"):
        StudyRecords(path).write_results({})


def test_a_study_behind_a_link_is_the_same_study(records, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(records.path)
    taken = pytest.raises(ConfigError, match="another process is running this study in")
    with records.locked(), taken, StudyRecords(link).locked():
        pass
    assert StudyRecords(link).study() == STUDY


def test_a_link_to_nowhere_is_called_broken(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    broken = pytest.raises(DataError, match=r"link/lock: .*link is a broken link; fix it or give another directory")
    with broken, StudyRecords(tmp_path / "link").locked():
        pass


def test_a_study_of_the_users_own_is_said_to_be_none_of_ours(records):
    (records.path / "study.yaml").write_text("name: mine")
    with pytest.raises(DataError, match=r"study\.yaml was not written by basecap; give another directory"):
        records.create(STUDY)


@pytest.mark.parametrize("name", ["study.yaml", "run.json", "evals.jsonl", "runs"])
def test_what_cannot_be_read_is_named_and_not_taken_for_empty(records, monkeypatch, name):
    run = records.run("a", 0)
    run.write_info(run_info("a"))
    run.append_evals([record()])

    def forbidding(read):
        def guarded(path: Path):
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path)

        return guarded

    for method in ("read_bytes", "iterdir"):
        monkeypatch.setattr(Path, method, forbidding(getattr(Path, method)))
    with pytest.raises(DataError, match=f"{name} cannot be read .Permission denied.; fix that"):
        _ = records.study(), records.runs(), run.evals()


def test_metrics_and_records_are_read_back(records):
    run = records.run("transformer++", 3)
    run.append_metrics({"step": 1, "train_loss": math.inf})
    run.append_metrics({"step": 2, "train_loss": np.float32(1.5)})
    assert math.isnan(run.metrics()[0]["train_loss"]) and run.metrics()[1] == {"step": 2, "train_loss": 1.5}
    run.append_evals([record(1), record(2, axis={"length": 8.0}), record(2, value=math.nan)])
    run.append_evals([record(1, value=3.0)])
    place = '"step": 2, "tokens": 20, "eval": "domain-loss", "subset": "code", "metric": "loss"'
    number = '"value": 2.0, "n": 5, "stderr": null, "axis": {"length": 8.0}'
    assert (run.path / "evals.jsonl").read_text().splitlines()[1] == f"{{{place}, {number}}}"
    first, second, third = run.evals()
    assert first.value == 3.0 and second.axis == {"length": 8.0} and math.isnan(third.value)
    assert {record.step for record in run.evals() if record.eval == "domain-loss"} == {1, 2} and {
        record.step for record in run.evals() if record.eval == "other"
    } == set()


def test_rewind_forgets_what_came_after(records):
    run = records.run("a", 0)
    losses = {"code": DocumentLosses(np.ones(2), np.ones(2, int), np.ones(2, int))}
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.append_documents("domain-loss", step, losses)
        run.append_evals([record(step)])
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"st')
    run.rewind(2)
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert {record.step for record in run.evals() if record.eval == "domain-loss"} == {
        1
    }  # a checkpoint stands before its evaluation
    (history,) = run.documents("domain-loss", [1])
    assert history.steps == [1]
    with pytest.raises(DataError, match="lacks the losses at step 2; remove"):
        run.documents("domain-loss", [1, 2])
    run.append_metrics({"step": 3})
    assert run.metrics()[-1] == {"step": 3}


@pytest.mark.parametrize("row", ['{"train_loss": 1.0}', '{"step": null}', '{"step": "two"}'])
@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl"])
def test_rewind_names_a_row_without_a_step_and_loses_nothing(records, name, row):
    run = records.run("a", 0)
    run.append_metrics({"step": 1})
    content = f'{{"step": 1}}\n{row}\n'
    (run.path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name} has a row without a step; fix or remove that row"):
        run.rewind(0)
    assert (run.path / name).read_text() == content


def test_rewind_leaves_documents_of_other_names_alone(records):
    run = records.run("a", 0)
    losses = {"code": DocumentLosses(np.ones(2), np.ones(2, int), np.ones(2, int))}
    run.append_documents("domain-loss", 3, losses)
    foreign = {"notes.npz", "domain-loss-3-copy.npz", "-.npz", "notes.losses"}
    for other in foreign:
        (run.path / "documents" / other).write_text("mine")
    run.rewind(2)
    assert {path.name for path in (run.path / "documents").iterdir()} == foreign


def test_names_that_are_no_file_names_stay_inside_and_apart(records):
    names = ["../evil", "/etc/passwd", "a b", "a/b", "a_b", ".hidden", "", "ä", "x" * 300]
    paths = [records.run(name, 0).path for name in names]
    assert len(set(paths)) == len(names)
    assert all(path.parent == records.path / "runs" and len(path.name) < 100 for path in paths)


def test_runs_are_those_that_have_started(records):
    assert records.runs() == []
    records.run("b", 0).write_info(run_info("b"))
    records.run("a b", 1).write_info(run_info("a b"))
    assert [run.info().name for run in records.runs()] == ["a b", "b"]
    assert records.run("c", 0).info() is None


def test_declarations_environment_and_report(records):
    assert records.declarations() == {} and records.environment() == {}
    declared = Declaration(name="passkey", unit="accuracy", better="higher", axes=("length",))
    records.write_declarations([declared])
    records.write_environment({"device": "CPU"})
    assert records.declarations() == {"passkey": declared} and records.environment() == {"device": "CPU"}
    page = records.write_report("<p>ä</p>", {"one.svg": "<svg/>"})
    assert page.read_text() == "<p>ä</p>" and (records.path / "figures" / "one.svg").exists()


def test_a_row_with_other_keys_is_refused(records):
    run = records.run("a", 0)
    run.append_evals([record()])
    path = run.path / "evals.jsonl"
    path.write_text(path.read_text().replace('"subset"', '"domain"'))
    with pytest.raises(DataError, match=r"evals\.jsonl:1 is damaged at '(subset|domain)' \(is (missing|unknown)\)"):
        run.evals()


@pytest.mark.parametrize(("key", "value"), [("step", "a"), ("value", "a"), ("eval", ["a"]), ("axis", 5), ("n", None)])
def test_a_row_with_a_value_of_another_kind_is_refused(records, key, value):
    run = records.run("a", 0)
    run.append_evals([record(), record()])
    path = run.path / "evals.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps({**json.loads(second), key: value})}\n")
    with pytest.raises(DataError, match=rf"evals\.jsonl:2 is damaged at '{key}' \(should be "):
        run.evals()


@pytest.mark.parametrize("studies", [5, [5], [None]])
def test_results_of_another_make_are_not_replaced(records, studies):
    (records.path / "results.json").write_text(json.dumps({"schema": 1, "studies": studies}))
    with pytest.raises(DataError, match=r"results\.json is damaged; restore or remove it"):
        records.refuse_lost_results({"studies": []})


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, "studies": 5}'])
def test_a_damaged_analysis_is_made_again_where_its_records_are(records, text):
    records.run("a", 0).write_info(run_info("a"))
    (records.path / "results.json").write_text(text)
    for analysis in (None, {"studies": []}):
        assert records.refuse_lost_results(analysis) is None
    records.write_results({"studies": []})
    assert read_json(records.path / "results.json") == {"studies": []}


@pytest.mark.parametrize("text", ["name: 2001-99-99\n", "name: " + "[" * 3000, "name: a\nname: b\n"])
def test_a_damaged_study_file_is_named(records, text):
    (records.path / "study.yaml").write_text("schema: 1\n" + text)
    with pytest.raises(DataError, match=r"study\.yaml is not valid YAML.*\); restore or remove it"):
        records.study()


@pytest.mark.parametrize("content", [{}, {"declarations": 5}, {"declarations": [{"name": "a"}]}])
def test_incomplete_declarations_are_named(records, content):
    (records.path / "declarations.json").write_text(json.dumps({"schema": 1, **content}))
    with pytest.raises(DataError, match=r"declarations\.json is damaged"):
        records.declarations()
