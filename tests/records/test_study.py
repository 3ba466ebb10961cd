"""The files of a study: nothing half written, nothing silently lost, every damage named."""

import errno
import json
import math
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from basecap.errors import ConfigError, DataError
from basecap.records import StudyRecords
from basecap.records.documents import DocumentLosses
from basecap.records.measured import Declaration, Record
from basecap.system.files import move_directory, read_json, safe_name

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
    records.run("a", 0).write_info({"name": "a"})
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


def test_a_directory_moves_to_another_disk_and_is_whole_there(tmp_path, monkeypatch):
    path, target, rename = tmp_path / "here" / "run", tmp_path / "there" / "run", Path.rename

    def rename_on_one_disk(this: Path, other: Path) -> Path:
        if ("there" in this.parts) != ("there" in other.parts):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(this, other)

    monkeypatch.setattr(Path, "rename", rename_on_one_disk)
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "file").write_text("1")
    (target.parent / ".partial" / "run" / "weights").mkdir(parents=True)  # a killed process left it
    move_directory(path, target)
    assert [found.relative_to(target.parent).as_posix() for found in sorted(target.parent.rglob("*"))] == [
        "run",
        "run/weights",
        "run/weights/file",
    ]
    assert not path.exists()


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
    run.write_info({"name": "a"})
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


def test_a_line_cut_off_by_a_kill_is_left_out_and_a_broken_one_named(records):
    run = records.run("a", 0)
    run.append_metrics({"step": 1})
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 2')
    assert run.metrics() == [{"step": 1}]
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(DataError, match=r"metrics\.jsonl:1 is not JSON"):
        run.metrics()


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


def made_up(counts: dict[str, int], rng: np.random.Generator) -> dict[str, DocumentLosses]:
    return {
        name: DocumentLosses(rng.random(count), rng.integers(1, 9, count), rng.integers(1, 99, count))
        for name, count in counts.items()
    }


def test_documents_are_read_back_per_subset(records):
    run = records.run("a", 0)
    written = made_up({"code": 3, "<b>": 0, "prose": 2}, np.random.default_rng(0))
    run.append_documents("domain-loss", 7, written)
    (found,) = run.documents("domain-loss", [7])
    assert list(found.documents.subsets) == list(written)
    for name, losses in written.items():
        place = found.documents.subsets[name]
        np.testing.assert_array_equal(found.nats[0, place], losses.nats)
        for column in ("tokens", "bytes", "clusters"):
            np.testing.assert_array_equal(getattr(found.documents, column)[place], getattr(losses, column))


def test_documents_of_all_steps_are_one_file_that_says_once_what_they_are(records):
    run, rng = records.run("a", 0), np.random.default_rng(0)
    first = made_up({"code": 50, "prose": 50}, rng)
    later = {name: replace(losses, nats=rng.random(50)) for name, losses in first.items()}
    run.append_documents("domain-loss", 1, first)
    (path,) = (run.path / "documents").iterdir()
    alone = path.stat().st_size
    for step in (3, 2, 1):  # the last losses of a step count
        run.append_documents("domain-loss", step, later)
    assert path.stat().st_size < alone + 3 * 900
    (found,) = run.documents("domain-loss", [1, 2, 3])
    assert sorted(found.steps) == [1, 2, 3]
    np.testing.assert_array_equal(found.nats, np.tile(np.concatenate([part.nats for part in later.values()]), (3, 1)))
    run.append_documents("domain-loss", 4, made_up({"code": 2}, rng))  # other documents
    assert [history.nats.shape for history in run.documents("domain-loss", [2, 4])] == [(1, 100), (1, 2)]


def test_every_kill_while_documents_are_appended_leaves_all_before(records):
    run, rng = records.run("a", 0), np.random.default_rng(0)
    losses = made_up({"code": 2}, rng)
    run.append_documents("domain-loss", 1, losses)
    (path,) = (run.path / "documents").iterdir()
    before = path.read_bytes()
    run.append_documents("domain-loss", 2, made_up({"code": 3}, rng))
    after = path.read_bytes()
    for end in range(len(before), len(after)):
        path.write_bytes(after[:end])
        (found,) = run.documents("domain-loss", [1])
        np.testing.assert_array_equal(found.nats[0], losses["code"].nats)
        run.append_documents("domain-loss", 2, losses)
        (found,) = run.documents("domain-loss", [2])
        np.testing.assert_array_equal(found.nats[0], losses["code"].nats)


def test_losses_of_archived_records_are_read_from_a_file_per_step(records):
    run = records.run("a", 0)
    (run.path / "documents").mkdir(parents=True)
    arrays = {name: np.ones(3, int) for name in ("tokens", "bytes")}
    arrays |= {"subsets": np.array(["code"]), "counts": np.array([3]), "clusters": np.array([4, 0, 4])}
    for step in (1, 2):
        np.savez_compressed(run.path / "documents" / f"domain-loss-{step}.npz", **arrays, nats=np.full(3, float(step)))
    run.append_documents("domain-loss", 3, {"code": DocumentLosses(np.full(3, 3.0), np.ones(3, int), np.ones(3, int))})
    found = run.documents("domain-loss", [1, 2, 3])
    assert [history.steps for history in found] == [[1], [2], [3]]
    assert [history.nats.tolist() for history in found] == [[[float(step)] * 3] for step in (1, 2, 3)]
    assert [history.documents.clusters.tolist() for history in found] == [[4, 0, 4], [4, 0, 4], [0, 1, 2]]
    (path,) = (run.path / "documents").glob("*-2.npz")
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"loss-2\.npz is damaged"):
        run.documents("domain-loss", [1, 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: b[:60], "lacks the losses at step 1"),
        (lambda b: b"", "lacks the losses at step 1"),
        (lambda b: b[:200] + bytes(40) + b[240:], "is damaged"),
        (lambda b: b[:-1] + bytes(1), "is damaged"),
        (lambda b: b[-500:], "is damaged"),
    ],
)
def test_damaged_documents_are_named(records, damage, words):
    run = records.run("a", 0)
    losses = DocumentLosses(np.arange(100.0), np.arange(100), np.arange(100))
    run.append_documents("domain-loss", 1, {"code": losses})
    path = next((run.path / "documents").iterdir())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{words}.*; remove .* to train it again"):
        run.documents("domain-loss", [1])


def test_names_that_are_no_file_names_stay_inside_and_apart(records):
    names = ["../evil", "/etc/passwd", "a b", "a/b", "a_b", ".hidden", "", "ä", "x" * 300]
    paths = [records.run(name, 0).path for name in names]
    assert len(set(paths)) == len(names)
    assert all(path.parent == records.path / "runs" and len(path.name) < 100 for path in paths)
    assert safe_name("transformer++") == "transformer++"


def test_runs_are_those_that_have_started(records):
    assert records.runs() == []
    records.run("b", 0).write_info({"name": "b"})
    records.run("a b", 1).write_info({"name": "a b"})
    assert [run.info()["name"] for run in records.runs()] == ["a b", "b"]
    assert records.run("c", 0).info() == {}


def test_json_is_strict_and_versioned(records):
    records.write_results({"value": np.float64("nan"), "list": (np.int64(1), 2.5)})
    path = records.path / "results.json"
    assert read_json(path) == {"value": None, "list": [1, 2.5]}
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(DataError, match="schema 99"):
        read_json(path)


def test_declarations_environment_and_report(records):
    assert records.declarations() == {} and records.environment() == {}
    declared = Declaration(name="passkey", unit="accuracy", better="higher", axes=("length",))
    records.write_declarations([declared])
    records.write_environment({"device": "CPU"})
    assert records.declarations() == {"passkey": declared} and records.environment() == {"device": "CPU"}
    page = records.write_report("<p>ä</p>", {"one.svg": "<svg/>"})
    assert page.read_text() == "<p>ä</p>" and (records.path / "figures" / "one.svg").exists()


def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(records, monkeypatch):
    records.write_results({"value": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(DataError, match="the disk is full"):
        records.write_results({"value": 2})
    monkeypatch.undo()
    assert read_json(records.path / "results.json") == {"value": 1}
    assert not list(records.path.glob(".*partial"))


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
    records.run("a", 0).write_info({"name": "a"})
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


@pytest.mark.parametrize("line", ["5", "[]", "null"])
def test_a_row_that_is_no_object_is_named(records, line):
    run = records.run("a", 0)
    run.append_evals([record()])
    with (run.path / "evals.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"evals\.jsonl:2 is not a JSON object"):
        run.evals()


def test_a_row_that_was_not_written_completely_costs_no_other(records):
    run = records.run("a", 0)
    run.append_evals([record(1)])
    path = run.path / "evals.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "tok')  # killed
    run.append_evals([record(3)])
    held = path.read_bytes()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(held) + 20, hard))
    try:
        with pytest.raises(DataError, match=r"cannot write .*evals\.jsonl: the disk is full; free disk space or"):
            run.append_evals([record(4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [found.step for found in run.evals()] == [1, 3] and path.read_bytes() == held
