"""Running a study: complete records, resume, runs side by side, failures that stay where they are."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from basecap.data.tokenizer import byte_tokenizer
from basecap.errors import ConfigError, DataError
from basecap.plan.runs import plan_runs
from basecap.plan.workloads import recorded_data
from basecap.plugins import load_plugin
from basecap.records import StudyRecords
from basecap.run.execute import execute
from basecap.run.executors import EXECUTORS, _worker, devices_for, executor_for
from basecap.run.executors.in_process import InProcessExecutor
from basecap.run.executors.local import LocalExecutor
from basecap.run.jobs import Execution
from basecap.run.sharing import Footprint
from basecap.study.config import StudyConfig, load_study, select
from basecap.system.processes import usable_cores
from tests.forks import command, pair
from tests.records.made_up import change, run_info
from tests.small_study import write_text
from tests.study._execute import ALONE, PLUGIN, run


def losses(out: Path) -> dict[str, list[float]]:
    return {found.info().name: [row["train_loss"] for row in found.metrics()] for found in StudyRecords(out).runs()}


def test_a_study_leaves_complete_records(study_file, tmp_path, monkeypatch):
    shown: list[str] = []

    @contextlib.contextmanager
    def progress(label, total, unit, pauses=None):
        yield lambda n, note="": shown.append(note)

    monkeypatch.setattr("basecap.train.loop.progress", progress)
    infos = run(study_file, tmp_path / "out")
    evaluations = [note for note in shown if note.startswith("evaluating domain-loss: ")]
    assert {note.removeprefix("evaluating domain-loss: ") for note in evaluations} == {
        "prose, 0 %",
        "notes, 0 %",
        "code, 0 %",
    }
    assert len(evaluations) == 2 * 5 * 3 and shown[-1].startswith("loss ")  # runs, points, domains of one batch
    assert [info.status for info in infos] == ["finished", "finished"]
    records = StudyRecords(tmp_path / "out")
    assert StudyConfig.model_validate(records.study()).name == "tiny"
    assert records.environment()["data"] and records.environment()["packages"]["torch"]
    assert list(records.declarations()) == ["domain-loss", "copying"]
    for found in records.runs():
        assert found.info().ops["linear_cross_entropy"].startswith("plain PyTorch: ")
        assert found.info().state_bytes > 0 and found.info().parameters > 0
        *parts, whole = found.info().seconds.values()
        assert min(parts) > 0 and 0.9 * whole < sum(parts) <= whole
        for name in records.declarations():  # by default whether it copies is measured wherever its loss is
            assert {record.step for record in found.evals() if record.eval == name} == {2, 4, 6, 8, 10}
        text = recorded_data(load_study(str(study_file)), records.path)
        assert found.info().passes == pytest.approx(2560 / text.train.tokens)
        last = {(r.subset, r.metric): r for r in found.evals() if r.step == 10}
        assert {subset for subset, _ in last} == {"prose", "notes", "code"}
        (history,) = found.documents("domain-loss", [10])
        for domain, place in history.documents.subsets.items():
            record, tokens = last[domain, "loss"], history.documents.tokens[place].sum()
            assert record.value == pytest.approx(history.nats[0, place].sum() / tokens)
            assert record.n == tokens and record.stderr > 0


def test_a_text_of_a_few_lines_trains(study, tmp_path):
    study["data"]["path"] = str(write_text(tmp_path / "short", documents=30, words=10))
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(study))
    assert {info.status for info in run(path, tmp_path / "out")} == {"finished"}


def test_running_again_does_nothing_and_only_adds(study_file, tmp_path):
    run(study_file, tmp_path / "out", only=("transformer++",))
    assert set(losses(tmp_path / "out")) == {"transformer++"}
    first = losses(tmp_path / "out")["transformer++"]
    records = StudyRecords(tmp_path / "out")
    former = records.study()
    former["train"]["seeds"] = former.pop("seeds")  # as archived records have it
    former["gap"]["tolerance"] = 0.02
    records.create(former)
    run(study_file, tmp_path / "out")
    assert yaml.safe_load((records.path / "study.yaml").read_text())["seeds"] == [0]
    assert set(losses(tmp_path / "out")) == {"transformer++", "window 4"}
    assert losses(tmp_path / "out")["transformer++"] == first


def test_what_is_finished_takes_no_place_from_what_is_not(study_file, tmp_path, monkeypatch):
    out, study = tmp_path / "out", load_study(str(study_file), ("seeds=[0,1,2]",))
    run(study_file, out)
    taken = []

    class Worker:
        def __init__(self, start, pools):
            self.device = pickle.loads(start)[1].device

        def take(self, job, spec):
            taken.append((spec.name, spec.seed, self.device))
            future = Future()
            future.set_result(run_info(spec.name, seed=spec.seed))
            return future

    monkeypatch.setattr("basecap.system.processes._Worker", Worker)
    runs = [spec for spec in plan_runs(study, byte_tokenizer().vocab_size) if spec.seed < 2 or spec.name == "window 4"]
    execution = Execution(study=study, out=out, device="cpu")
    runtime = SimpleNamespace(log=print)
    devices = ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1", "cuda:2"]
    with LocalExecutor(execution, runtime, devices) as executor:
        infos = executor.train(runs)
    assert [(info.name, info.seed) for info in infos] == [(spec.name, spec.seed) for spec in runs]
    assert len(taken) == 3 and {device for _, _, device in taken} == {"cuda:0", "cuda:1", "cuda:2"}


@pytest.mark.parametrize(
    ("chosen", "asked", "world", "per_device", "expected"),
    [
        ("cpu", None, 1, 1, ["cpu"]),
        ("cpu", "cpu", 1, 2, ["cpu", "cpu"]),
        ("cuda:0", None, 1, 1, ["cuda:0", "cuda:1"]),
        ("cuda:0", None, 1, 2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("cuda:1", "cuda:1", 1, 2, ["cuda:1", "cuda:1"]),
        ("cuda:1", None, 2, 1, ["cuda:1"]),
    ],
)
def test_runs_go_to_every_gpu(monkeypatch, chosen, asked, world, per_device, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_for(torch.device(chosen), asked, world, per_device) == expected


def test_an_executor_is_chosen_by_its_name():
    execution, runtime = Execution(study=None, out=Path("out"), device="cpu"), SimpleNamespace(log=print)
    assert isinstance(executor_for(execution, runtime, ["cpu"]), InProcessExecutor)
    assert isinstance(executor_for(execution, runtime, ["cpu", "cpu"]), LocalExecutor)
    assert isinstance(executor_for(execution, runtime, ["cpu", "cpu"], "in-process"), InProcessExecutor)
    assert {"in-process", "local"} <= {*EXECUTORS.names()}
    with pytest.raises(ConfigError, match="unknown executor 'locl': did you mean 'local'"):
        executor_for(execution, runtime, ["cpu"], "locl")


@pytest.mark.parametrize("per_device", [2, "auto"])
def test_processes_that_train_one_run_together_share_no_device(per_device):
    with pytest.raises(ConfigError, match=r"under torchrun .* leave out --per-device"):
        devices_for(torch.device("cuda"), None, 2, per_device)


def test_a_trial_step_chooses_how_many_runs_share_a_gpu(study_file, tmp_path, monkeypatch):
    """Of 8 places on each of two GPUs: trial steps take one place a GPU, and leave room for three runs on each."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = devices_for(torch.device("cuda"), None, 1, "auto")
    assert len(devices) == 16
    steps, widths, starts = [], [], []

    class Worker:
        def __init__(self, start, pools):
            self.start = pickle.loads(start)[1]
            starts.append(self.start)

        def take(self, job, spec):
            future = Future()
            if job is _worker.measure:
                steps.append((spec.name, self.start.device))
                future.set_result(Footprint(memory=3 * 2**30, share=0.2, total=13 * 2**30))
                return future
            future.name = {"name": spec.name, "seed": spec.seed, "status": "finished"}
            return future

    def wait(running, return_when):
        left = [future for future in running if not future.done()]
        if left:
            widths.append(len(running))
            left[0].set_result(left[0].name)
        return SimpleNamespace(done=[future for future in running if future.done()])

    monkeypatch.setattr("basecap.system.processes._Worker", Worker)
    monkeypatch.setattr("basecap.system.processes.wait", wait)
    monkeypatch.setattr("basecap.system.mps.CONTROL", "no-such-program")
    config, said = load_study(str(study_file), ("seeds=[0,1,2,3,4,5,6]",)), []
    runs = plan_runs(config, byte_tokenizer().vocab_size)
    execution = Execution(study=config, out=tmp_path / "out", device="cuda", auto=True)
    with LocalExecutor(execution, SimpleNamespace(log=said.append), devices) as executor:
        executor.train(runs)
    assert steps == [("transformer++", "cuda:0"), ("window 4", "cuda:1")] and max(widths) == 6
    assert {(start.threads, start.compilers) for start in starts} == {(1, max(1, usable_cores() // 16))}
    assert said == [
        "Runs on the same GPU take turns: CUDA MPS is not installed (no-such-program is not found).",
        "3 runs share each GPU (--per-device auto): in a trial step one reaches 20% of the rate of matrix products and "
        "takes at most 3.0 of 13 GiB.",
    ]


def test_a_killed_process_costs_its_own_run_alone(study, tmp_path):
    """Killed in a trial step, which costs an architecture its runs, or while it trains, which costs the run.

    What lacks memory, or may have, trains again when the others have ended: "crowded" succeeds then, "killed" does not.
    """
    plugin, path, out = tmp_path / "killed.py", tmp_path / "tiny.yaml", tmp_path / "out"
    fatal = PLUGIN.replace("x * torch.nan", "os._exit(9)")
    killed = fatal.replace('"breaks"', '"killed"').replace("self.calls >= 3", "WORKS and self.calls >= 3")
    early = fatal.replace('"breaks"', '"early"').replace("self.calls >= 3", "WORKS")
    crowded = PLUGIN.replace('"breaks"', '"crowded"').replace("x * torch.nan if", "lack() if WORKS and first() and")
    full = tmp_path / "full"
    head = f"""
import multiprocessing, os
from pathlib import Path
WORKS, FULL = multiprocessing.parent_process() is not None, Path({str(full)!r})

def first():
    return not FULL.exists()

def lack():
    FULL.touch()
    raise MemoryError("no room")
"""
    plugin.write_text(head + killed + early + crowded)
    names = ["transformer++", "early", "killed", "crowded"]
    path.write_text(yaml.safe_dump(study | {"architectures": names, "evals": ["domain-loss"]}))
    load_plugin(plugin)
    config, said = load_study(str(path)), []
    only = select(config, [])
    infos = execute(config, out, only=only, device="cpu", plugins=[plugin], log=said.append, per_device=2)
    statuses = [("early", "failed"), ("transformer++", "finished"), ("killed", "failed"), ("crowded", "finished")]
    assert full.exists() and [(info.name, info.status) for info in infos] == statuses
    recorded = {found.info().name: found.info() for found in StudyRecords(out).runs()}
    assert recorded == {info.name: info for info in infos}
    assert said[0].startswith("killed fails ") and said[1].startswith("crowded fails ")  # they lack decoding
    assert said[3].startswith("Training continues with transformer++, killed, crowded; ")
    again = f"killed (seed 0) failed: {recorded['killed']['message']}"
    assert [said[2], *said[4:]] == [
        f"early failed before training: {recorded['early']['message']}",
        again,
        "killed (seed 0): continues alone on its device.",
        again,
        "crowded (seed 0): continues alone on its device.",
    ]
    assert all("was killed, possibly out of memory" in recorded[name]["message"] for name in ("early", "killed"))
    assert [len(losses(out)[name]) for name, _ in statuses] == [0, 10, 2, 10]


def test_a_directory_takes_more_seeds_and_architectures(study, tmp_path):
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++"]}))
    run(path, out)
    first = StudyRecords(out).run("transformer++", 0).metrics()
    path.write_text(yaml.safe_dump(study))
    infos = run(path, out, settings=("seeds=[1]",))
    assert [(info.name, info.seed) for info in infos] == [("transformer++", 1), ("window 4", 1)]
    infos = run(path, out, settings=("seeds=[1,0]",), only=("window 4",))
    assert len(infos) == 4 and StudyRecords(out).run("transformer++", 0).metrics() == first
    assert StudyRecords(out).study()["seeds"] == [0, 1]
    assert {row["name"] for row in StudyRecords(out).study()["architectures"]} == {"transformer++", "window 4"}
    other = tmp_path / "other"
    shutil.copytree(out / "runs" / "transformer++-s0", other / "runs" / "transformer++-s0")
    path.write_text(yaml.safe_dump(study | {"name": "other", "architectures": ["transformer++"]}))
    trained = run(path, other)
    assert len(trained) == 1 and StudyRecords(other).run("transformer++", 0).metrics() == first
    shutil.copytree(out / "runs", tmp_path / "third" / "runs")
    with pytest.raises(ConfigError, match=r"window_4-\w+-s\d is no run of this study; copy only runs that it has"):
        run(path, tmp_path / "third")


def test_the_recorded_machine_stays_once_something_has_run(study_file, tmp_path):
    only, path = ("transformer++",), tmp_path / "out" / "environment.json"
    run(study_file, tmp_path / "out", only=only)
    change(path, device="NVIDIA H200")
    run(study_file, tmp_path / "out", only=only)
    assert json.loads(path.read_text())["device"] == "NVIDIA H200"
    shutil.rmtree(tmp_path / "out" / "runs")
    run(study_file, tmp_path / "out", only=only)
    assert json.loads(path.read_text())["device"].startswith("CPU")


def test_a_run_that_breaks_does_not_stop_the_others(study, tmp_path):
    plugin = tmp_path / "breaks.py"
    plugin.write_text(PLUGIN)
    load_plugin(plugin)
    study["architectures"].insert(1, "breaks")
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    infos = run(path, tmp_path / "out", plugins=(plugin,))
    assert [info.status for info in infos] == ["finished", "failed", "finished"]
    assert "step 3" in infos[1].message and "blocks.0.mixer" in infos[1].message


def test_an_interrupted_command_with_runs_side_by_side_resumes_with_the_same_curves(study, tmp_path):
    study["train"] |= {"tokens": 20_480, "eval_every": 10_240}
    path, out = tmp_path / "tiny.yaml", tmp_path / "stopped"
    path.write_text(yaml.safe_dump(study))
    command = [sys.executable, "-m", "basecap.cli", "run", path, "--device", "cpu", "--per-device", "2", "--out", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    stopped = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while len(losses(out)) < 2 or not all(losses(out).values()):
        assert stopped.poll() is None and time.monotonic() < deadline, stopped.stderr.read()
        time.sleep(0.05)
    os.kill(stopped.pid, signal.SIGTERM)
    _, err = stopped.communicate()
    assert stopped.returncode == 143 and err.endswith("interrupted; run the same command again to resume.\n")
    assert {found.info().status for found in StudyRecords(out).runs()} == {"running"}
    before = {found.info().name: found.info().seconds["steps"] for found in StudyRecords(out).runs()}
    steps = {name: len(rows) for name, rows in losses(out).items()}
    for name, count in steps.items():
        stop = f"{name} (seed 0): stopped at step {count} of 80 with a checkpoint; run the same command again"
        assert err.splitlines().count(f"{stop} to resume.") == 1
    config, said = load_study(str(path)), []
    infos = execute(config, out, only=select(config, []), device="cpu", plugins=(), log=said.append)
    assert [info.status for info in infos] == ["finished", "finished"]
    assert all(info.seconds["steps"] > before[info.name] > 0 for info in infos)
    assert said == [f"{name} (seed 0): resumed at step {count} of 80." for name, count in steps.items()]
    run(path, tmp_path / "straight")
    for name, expected in losses(tmp_path / "straight").items():
        assert losses(out)[name] == pytest.approx(expected, rel=1e-5)  # threads may add in another order
    one, two = (StudyRecords(place).runs()[0].evals() for place in (out, tmp_path / "straight"))
    assert [found.key for found in one] == [found.key for found in two]


def test_a_run_records_its_own_ops_alone(study_file, tmp_path):
    settings = ("architectures=[mamba-2, transformer++]", "train.tokens=512")
    first, second = (info.ops for info in run(study_file, tmp_path / "out", settings))
    assert set(first) & set(second) == {"linear_cross_entropy"}
    assert "ssd" in first and set(second) == {"attention", "linear_cross_entropy"}
    assert second["attention"] == "PyTorch's SDPA: full attention is faster on SDPA"


def test_damaged_documents_are_found_before_anything_is_trained(study_file, tmp_path):
    out, settings = tmp_path / "out", ("train.tokens=512",)
    run(study_file, out, settings, only=("transformer++",))
    documents = next(StudyRecords(out).run("transformer++", 0).path.glob("documents/*.losses"))
    documents.write_bytes(documents.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"losses lacks the losses at step .*; remove .*transformer\+\+-s0 to train it"):
        run(study_file, out, settings)
    assert set(losses(out)) == {"transformer++"}


def test_an_error_in_one_of_two_processes_does_not_leave_the_other_waiting(study, tmp_path):
    plugin, path = tmp_path / "alone.py", tmp_path / "tiny.yaml"
    plugin.write_text(ALONE)
    names = [*study["architectures"], "alone"]
    path.write_text(yaml.safe_dump(study | {"architectures": names, "evals": ["domain-loss", "fails-once"]}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*launcher, "-m", "basecap.cli", "run", "--device", "cpu", path, "--out", tmp_path / "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 200, "check": False}
    done = subprocess.run([*map(str, words), "--plugin", str(plugin)], **options)
    assert done.returncode == 1, done.stderr[-3000:]
    infos = {info.name: info for info in (found.info() for found in StudyRecords(tmp_path / "out").runs())}
    assert {name: info.status for name, info in infos.items()} == {
        "transformer++": "failed",  # the leader's evaluation: both processes know and go on
        "window 4": "finished",
        "alone": "failed",  # within a step: the other is ended
    }
    line = ALONE.splitlines().index('            raise RuntimeError("this evaluation cannot")') + 1
    assert infos["transformer++"].message == f"RuntimeError: this evaluation cannot ({plugin}:{line})"
    assert "in run" in infos["transformer++"].traceback
    line = ALONE.splitlines().index('        raise MemoryError("no room in process 1")') + 1
    assert infos["alone"].message == f"MemoryError: no room in process 1 ({plugin}:{line})"
    assert done.stderr.count("transformer++ (seed 0) failed: RuntimeError: this evaluation cannot") == 1
    assert done.stderr.count("alone (seed 0) failed in process 1, which ends all processes (--only") == 1


def test_two_processes_run_a_study_and_one_reports(study_file, tmp_path):
    inputs, examples = [{}, {"number": 1}], {"examples": 3, "options": {"vocab": 16, "length": 32, "pairs": 4}}
    evals = f"evals={json.dumps(['domain-loss', {'influence-map': {'inputs': inputs}}, {'selectivity': examples}])}"
    run(study_file, tmp_path / "one", (evals,))
    arguments = ("run", study_file, "--device", "cpu", "--out", tmp_path / "two", "--set", evals)
    assert pair(command, *arguments, output=tmp_path / "output", seconds=250).count("report.html") == 1
    for name, expected in losses(tmp_path / "one").items():
        assert losses(tmp_path / "two")[name] == pytest.approx(expected, rel=1e-4)
    for one, two in zip(*(StudyRecords(tmp_path / out).runs() for out in ("one", "two")), strict=True):
        assert list(one.maps()) == list(two.maps()) == ["influence-map-0", "influence-map-1"]
        assert [found.key for found in one.evals()] == [found.key for found in two.evals()]
        values = [found.value for found in two.evals()]  # scores are differences of shares, some of them near 0
        assert [found.value for found in one.evals()] == pytest.approx(values, rel=1e-4, abs=1e-6)
