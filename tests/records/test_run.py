"""The records of a run: read back, cut off by a kill, taken back to a checkpoint, damaged."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from basecap.errors import DataError
from basecap.records import Machine, RunInfo
from basecap.records.documents import DocumentLosses
from basecap.system.files import replacing, write_json
from tests.records.made_up import change, record, run_info


def test_the_info_of_a_run_is_read_back(records):
    run = records.run("a", 0)
    assert run.info() is None and not run.finished
    machine = Machine(device="CPU", precision="fp32", packages={"torch": "2.8"})
    info = run_info("a", lr=1e-3, state_bytes=0, before=(machine,), device="NVIDIA H200", precision="bf16")
    run.write_info(info)
    assert run.info() == info and run.finished and info.machine == Machine(device="NVIDIA H200", precision="bf16")
    failed = info.failed("the loss is not finite")
    run.write_info(failed)
    assert run.info() == failed and not run.finished


def test_what_a_run_has_recorded_is_on_the_disk_before_it_is_finished(records, monkeypatch):
    """A crash of the machine loses what is not: here the content of files as it was last forced to the disk."""
    run, disk = records.run("a", 0), {}

    def force(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        disk[Path(path).name] = Path(path).read_bytes()

    monkeypatch.setattr("os.fsync", force)
    run.append_evals([record(step=1)])
    run.append_metrics({"step": 1})
    run.write_info(run_info("a", status="running"))
    assert "evals.jsonl" not in disk  # training waits for the disk at checkpoints alone
    run.write_info(run_info("a"))
    for name in ("evals.jsonl", "metrics.jsonl"):
        assert disk[name] == (run.path / name).read_bytes()
    (written,) = (content for name, content in disk.items() if name.startswith(".run.json."))
    assert json.loads(written)["status"] == "finished"


def test_the_info_of_an_earlier_version_may_lack_keys_and_have_others(records):
    run = records.run("a", 0)
    row = {"name": "a on b", "seed": 1, "use": "a", "status": "finished", "message": "", "other": 1}
    write_json(run.path / "run.json", row | {"before": None, "plugins": None, "seconds": 8.5})
    assert run.info() == RunInfo(name="a on b", seed=1, use="a", status="finished", message="")
    assert run.info().series == "a on b" and run_info("a on b", architecture="a").series == "a"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "done"}, "at 'status'"),
        ({"seed": "x"}, "at 'seed' .should be a whole number"),
        ({"name": None}, "'name'"),
    ],
)
def test_damaged_info_is_named(records, changes, words):
    run = records.run("a", 0)
    run.write_info(run_info("a"))
    change(run.path / "run.json", **changes)
    with pytest.raises(DataError, match=rf"run\.json is damaged .*{words}.*; restore or remove it\."):
        run.info()


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


def test_rewind_forgets_what_came_after(records, monkeypatch):
    run = records.run("a", 0)
    losses = {"code": DocumentLosses(np.ones(2), np.ones(2, int), np.ones(2, int))}
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.append_documents("domain-loss", step, losses)
        run.append_evals([record(step)])
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"st')
    with pytest.raises(KeyError), monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda path, missing_ok: None)
        with replacing(run.path / "maps" / "map-1.npz"):
            raise KeyError
    (run.path / "mine.partial").touch()
    run.rewind(2)
    assert [path.name for path in run.path.rglob("*.partial")] == ["mine.partial"]
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
