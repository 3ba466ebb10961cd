"""Executors: chosen by name, and which job runs where."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from basecap.cli.commands import app
from basecap.data.tokenizer import byte_tokenizer
from basecap.errors import ConfigError
from basecap.plan.runs import plan_runs
from basecap.records import StudyRecords
from basecap.run.execute import execute
from basecap.run.executors import EXECUTORS, Resources, _worker, devices_for
from basecap.run.executors.in_process import InProcessExecutor
from basecap.run.executors.local import LocalExecutor
from basecap.run.jobs import Execution, Runtime
from basecap.run.sharing import Footprint
from basecap.run.stored_weights import evaluate_directory
from basecap.study.config import load_study
from basecap.system.processes import usable_cores
from basecap.train.distributed import Processes
from tests.records.made_up import run_info


def runtime_of(out: Path, log: Callable[[str], None]) -> Runtime:
    """Return what an executor uses of a runtime without jobs in this process."""
    nothing = {"workloads": {}, "evaluations": (), "group": Processes()}
    return Runtime(records=StudyRecords(out), device=torch.device("cpu"), log=log, **nothing)


def test_what_is_finished_takes_no_place_from_what_is_not(study_file, tmp_path, monkeypatch):
    out, study = tmp_path / "out", load_study(str(study_file), ("seeds=[0,1,2]",))
    for name in ("transformer++", "window 4"):
        StudyRecords(out).run(name, 0).write_info(run_info(name))
    taken = []

    class Worker:
        def __init__(self, start, place, pools):
            self.device = self.place = pickle.loads(start)[1].device
            self.kind = None
            assert place == self.device

        def take(self, job, spec):
            taken.append((spec.name, spec.seed, self.device))
            future = Future()
            future.set_result(run_info(spec.name, seed=spec.seed))
            return future

    monkeypatch.setattr("basecap.system.processes._Worker", Worker)
    runs = [spec for spec in plan_runs(study, byte_tokenizer().vocab_size) if spec.seed < 2 or spec.name == "window 4"]
    execution = Execution(study=study, out=out, device="cpu")
    runtime = runtime_of(out, print)
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
    assert devices_for(torch.device(chosen), Resources(device=asked, per_device=per_device), world) == expected


def test_an_executor_is_chosen_by_its_name():
    execution, runtime = Execution(study=None, out=Path("out"), device="cpu"), SimpleNamespace(log=print)
    assert isinstance(EXECUTORS.get("local")(execution, runtime, ["cpu"]), InProcessExecutor)
    assert isinstance(EXECUTORS.get("local")(execution, runtime, ["cpu", "cpu"]), LocalExecutor)
    assert isinstance(EXECUTORS.get("in-process")(execution, runtime, ["cpu"]), InProcessExecutor)
    with pytest.raises(ConfigError, match="executor in-process does one job at a time; leave out --per-device"):
        devices_for(torch.device("cpu"), Resources(per_device=2, executor="in-process"), 1)


def test_an_executor_of_a_plugin_trains_and_evaluates_a_study(study_file, tmp_path):
    plugin, out, said = tmp_path / "own_executor.py", tmp_path / "out", []
    plugin.write_text(
        "from basecap.run.executors import executor\n"
        "from basecap.run.executors.in_process import InProcessExecutor\n\n"
        '@executor("mine")\n'
        "def mine(execution, runtime, devices):\n"
        '    runtime.log(f"mine runs on {devices}")\n'
        "    return InProcessExecutor(execution, runtime, devices)\n"
    )
    config, given = load_study(str(study_file), ["train.tokens=512"]), {"plugins": [plugin], "log": said.append}
    with pytest.raises(ConfigError, match="unknown executor 'mne': did you mean 'mine'"):
        execute(config, out, only={"transformer++"}, on=Resources(device="cpu", executor="mne"), **given)
    assert not out.exists() and said == []
    on = Resources(device="cpu", executor="mine")
    (info,) = execute(config, out, only={"transformer++"}, on=on, **given)
    assert info.finished and said[0] == "mine runs on ['cpu']"
    said.clear()
    assert evaluate_directory(out, add=(), at=None, only=(), on=on, **given) == 0
    assert said[0] == "mine runs on ['cpu']"


@pytest.mark.parametrize("name", ["slurm", "ray"])
def test_run_and_eval_take_the_settings_of_an_executor(name, study_file, tmp_path, monkeypatch):
    taken = []

    def take(*arguments, on, **options):
        taken.append((on.executor, on.settings))

    monkeypatch.setattr("basecap.run.execute.execute", take)
    monkeypatch.setattr("basecap.run.stored_weights.evaluate_directory", take)
    StudyRecords(tmp_path / "out").create({"name": "tiny"})
    commands = [["run", str(study_file)], ["eval", str(tmp_path / "out")]]
    for words in commands:
        app([*words, "--executor", name, f"--{name}", "a=1, b=2"], standalone_mode=False)
        with pytest.raises(ConfigError, match=rf"^--{name} has settings of executor {name}; add --executor {name}\.$"):
            app([*words, f"--{name}", "a=1"], standalone_mode=False)
    assert taken == [(name, {"a": "1", "b": "2"})] * 2


@pytest.mark.parametrize("per_device", [2, "auto"])
def test_processes_that_train_one_run_together_share_no_device(per_device):
    with pytest.raises(ConfigError, match=r"under torchrun .* leave out --per-device"):
        devices_for(torch.device("cuda"), Resources(per_device=per_device), 2)


def test_a_trial_step_chooses_how_many_runs_share_a_gpu(study_file, tmp_path, monkeypatch):
    """Of 8 places on each of two GPUs: trial steps take one place a GPU, and leave room for three runs on each."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = devices_for(torch.device("cuda"), Resources(per_device="auto"), 1)
    assert len(devices) == 16
    steps, widths, starts = [], [], []

    class Worker:
        def __init__(self, start, place, pools):
            self.start, self.place, self.kind = pickle.loads(start)[1], place, None
            starts.append(self.start)

        def take(self, job, spec):
            future = Future()
            if job is _worker.measure:
                steps.append((spec.name, self.start.device))
                future.set_result(Footprint(memory=3 * 2**30, share=0.2, free=13 * 2**30))
                return future
            future.name = run_info(spec.name, seed=spec.seed)
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
    execution = Execution(study=config, out=tmp_path / "out", device="cuda", on=Resources(per_device="auto"))
    with LocalExecutor(execution, runtime_of(tmp_path / "out", said.append), devices) as executor:
        executor.train(runs)
    assert steps == [("transformer++", "cuda:0"), ("window 4", "cuda:1")] and max(widths) == 6
    assert {(start.threads, start.compilers) for start in starts} == {(1, max(1, usable_cores() // 16))}
    assert said == [
        "Runs on the same GPU take turns: CUDA MPS is not installed (no-such-program is not found).",
        "3 runs share each GPU (--per-device auto): in a trial step one reaches 20 % of the rate of matrix products "
        "and takes at most 3.0 of 13 GiB that are free.",
    ]
