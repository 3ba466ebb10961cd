"""The CPU threads of a run: timed in its trial, recorded, and the same in every later start."""

from types import SimpleNamespace

import pytest
import torch

from basecap.errors import ConfigError
from basecap.plan.estimate import estimate, remarks
from basecap.plan.runs import plan_study
from basecap.records import StudyRecords
from basecap.run import threads
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.study.config import load_study
from basecap.system import environment
from basecap.system.processes import usable_cores


@pytest.mark.parametrize(("seconds", "chosen"), [(40, 1), (10, 1), (9.5, 1), (9, 2)])
def test_several_threads_must_be_clearly_faster_than_one(seconds, chosen, monkeypatch):
    monkeypatch.setattr(environment, "most_threads", lambda: 2)
    monkeypatch.setattr(threads, "SECONDS", 1e6)
    used, now = [], [0.0]
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step():
        used.append(torch.get_num_threads())
        now[0] += 100 if len(used) < 3 else seconds if used[-1] == 2 else 10

    found = threads.step_seconds(step, torch.device("cpu"))
    assert used == [1, 2] * threads.ROUNDS and torch.get_num_threads() == 1
    assert found == {1: 10, 2: seconds} and threads.faster(found) == chosen
    assert threads.step_seconds(step, torch.device("cuda")) == {}


def test_one_slow_step_of_each_is_enough(monkeypatch):
    monkeypatch.setattr(environment, "most_threads", lambda: 2)
    monkeypatch.setattr(threads, "SECONDS", 0.0)
    assert set(threads.step_seconds(lambda: None, torch.device("cpu"))) == {1, 2}


def test_a_process_has_the_threads_that_its_cores_allow(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert environment.most_threads() == usable_cores()


def test_every_start_of_a_study_trains_with_the_threads_of_its_first_trial(study_file, tmp_path, monkeypatch):
    out, said = tmp_path / "out", []
    timed = [{1: 0.02, 2: 0.01}]

    def start(*settings, count=None):
        config = load_study(str(study_file), ("train.tokens=256", "evals=[domain-loss]", *settings))
        given = {"on": Resources(device="cpu", threads=count), "plugins": (), "log": said.append}
        return [info.threads for info in execute(config, out, only={"transformer++"}, **given)]

    monkeypatch.setattr(environment, "most_threads", lambda: 2)
    monkeypatch.setattr(threads, "step_seconds", lambda step, device: step() or timed.pop(0))
    assert start() == [2] and torch.get_num_threads() == 1
    assert said[0] == "CPU threads: 2 for transformer++; a step takes 20 ms with 1 and 10 ms with 2."
    assert start("seeds=[0, 1]") == [2, 2] and StudyRecords(out).run_threads() == {"transformer++": 2}
    monkeypatch.setattr("basecap.plan.estimate.matrix_rate", lambda device: 1e12)
    study = load_study(str(study_file))
    plan = plan_study(study, study.vocabulary)
    line = f"CPU threads of a run: 2, as recorded in {out}."
    assert line in remarks(plan, estimate(plan, out), out)
    assert start("seeds=[0, 1, 2]", count=1) == [2, 2, 1] and StudyRecords(out).run_threads() == {"transformer++": 1}


def test_a_choice_that_is_recorded_stays(tmp_path):
    records, said = StudyRecords(tmp_path), []
    for seconds in (0.2, 0.05):
        threads.record_choice({"a": {1: 0.1, 8: seconds}, "b": {}}, records, said.append)
    assert records.run_threads() == {"a": 1, "b": 1}
    assert said[0] == "CPU threads: 1 for a; a step takes 100 ms with 1 and 200 ms with 8."


def test_a_number_of_threads_is_for_runs_on_a_cpu():
    with pytest.raises(ConfigError, match="--threads is for runs on a CPU, and these run on cuda; leave it out"):
        threads.refuse(2, torch.device("cuda"))
