"""The files of a study: nothing half written, nothing silently lost, every damage named."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from basecap.errors import ConfigError, DataError, LostDirectory
from basecap.records import StudyRecords
from basecap.records.documents import DocumentLosses
from basecap.records.measured import Declaration
from basecap.system.files import read_json
from tests.records.made_up import STUDY, record, run_info


def test_a_study_is_read_back_and_written_where_it_differs(records):
    path = records.path / "study.yaml"
    before = path.stat()
    records.create(STUDY)
    assert records.study() == STUDY and path.stat().st_ino == before.st_ino
    records.create({**STUDY, "train": {"lr": 2e-3}})
    assert records.study() == {**STUDY, "train": {"lr": 2e-3}}


def test_one_command_at_a_time_sets_a_study_up(records):
    said, done = [], threading.Event()

    def second() -> None:
        with StudyRecords(records.path).locked(said.append):
            done.set()

    waiting = threading.Thread(target=second)
    with records.locked():
        waiting.start()
        assert not done.wait(0.3) and records.busy
    waiting.join(60)
    assert done.is_set() and not records.busy
    assert said == [f"waiting for another command that sets up the study in {records.path}."]


def test_a_run_has_one_process_and_a_study_has_many(records, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(records.path)
    with records.entered(), StudyRecords(link).entered() as other:
        run, own = records.run("base", 0), other.run("base", 0)
        with records.claimed(run) as mine, other.claimed(own) as taken, other.claimed(other.run("base", 1)) as free:
            assert (mine, taken, free) == (True, False, True) and other.is_claimed(own)
        with other.claimed(own) as mine:
            assert mine and records.busy
        assert not records.is_claimed(run) and records.busy
    assert not records.busy and not (records.path / "locks").exists()


def test_a_run_that_another_process_took_over_is_written_no_more(records, monkeypatch):
    monkeypatch.setattr("basecap.system.locks._has_flock", lambda directory: False)
    with records.entered():
        run = records.run("base", 0)
        with records.claimed(run) as mine:
            (lease,) = (records.path / "locks").glob("runs-base-s0*")
            run.append_metrics({"step": 1})
            lease.rename(lease.with_suffix(".old"))
            lease.write_text("of another process")
            for write in (lambda: run.append_metrics({"step": 2}), run.flush):
                with pytest.raises(LostDirectory, match=r"another process took over a run in .*, as this one did not"):
                    write()
            assert mine and len(run.metrics()) == 1


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
    with pytest.raises(DataError, match="file is a file; give a directory"):
        StudyRecords(path).study()
    for near in (records.path / "runs" / "base-s0", records.path / "runs"):
        with pytest.raises(ConfigError, match=rf"holds no study \(no study\.yaml\); did you mean '{records.path}'\?$"):
            StudyRecords(near).study()
    (records.path / "study.yaml").write_text("name: of the user\n")
    with pytest.raises(ConfigError, match=r"holds no study \(no study\.yaml\); give the directory of"):
        StudyRecords(near).study()
    with pytest.raises(DataError, match=r"file is not a directory; give another directory\.$"):
        StudyRecords(path).write_results({})


def test_a_study_behind_a_link_is_the_same_study(records, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(records.path)
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
        def guarded(path: Path, *options: int):
            if Path(path).name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path, *options)

        return guarded

    monkeypatch.setattr(Path, "iterdir", forbidding(Path.iterdir))
    monkeypatch.setattr("os.open", forbidding(os.open))
    with pytest.raises(DataError, match=f"{name} cannot be read .Permission denied.; fix that"):
        _ = records.study(), records.runs(), run.evals()


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
    page = records.write_report("<p>ä</p>", {"one.svg": b"<svg/>"})
    assert page.read_text() == "<p>ä</p>" and (records.path / "figures" / "one.svg").exists()


def test_nothing_is_written_through_a_linked_folder(records, tmp_path_factory):
    elsewhere, run = tmp_path_factory.mktemp("elsewhere"), records.run("a", 0)
    run.write_info(run_info("a"))
    losses = {"code": DocumentLosses(*np.ones((3, 3)))}
    for folder, write in (
        (records.path / "figures", lambda: records.write_report("<p>", {"one.svg": b"<svg>"})),
        (run.path / "documents", lambda: run.append_documents("domain-loss", 1, losses)),
        (run.path / "maps", lambda: run.write_maps("influence-map", 1, {})),
    ):
        folder.symlink_to(elsewhere)
        with pytest.raises(DataError, match=f"{folder.name} is a link, through which nothing is written"):
            write()
    assert not list(elsewhere.iterdir())


@pytest.mark.timeout(20)
def test_records_that_never_end_are_refused(records):
    run = records.run("a", 0)
    run.write_info(run_info("a"))
    os.mkfifo(run.path / "metrics.jsonl")
    (run.path / "evals.jsonl").symlink_to("/dev/zero")
    for read, words in ((run.metrics, "metrics.jsonl is a named pipe"), (run.evals, "evals.jsonl is a device")):
        with pytest.raises(DataError, match=f"{words}; replace it by a regular file"):
            read()


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
    with pytest.raises(DataError, match=r"study\.yaml is not valid YAML.*\); restore it, or give"):
        records.study()


@pytest.mark.parametrize("content", [{}, {"declarations": 5}, {"declarations": [{"name": "a"}]}])
def test_incomplete_declarations_are_named(records, content):
    (records.path / "declarations.json").write_text(json.dumps({"schema": 1, **content}))
    with pytest.raises(DataError, match=r"declarations\.json is damaged"):
        records.declarations()
