"""Trackers get the recorded rows once, and never end a study; a trace has the steps that were asked for."""

import gzip
import importlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from basecap.errors import ConfigError
from basecap.records import RunRecords, StudyRecords
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.run.trackers import TRACKERS, Follower, TrackedRun, Tracker, _following, chosen_trackers
from basecap.run.watching import Watching, parse_profile, watching
from basecap.study.config import load_study
from basecap.train.profile import StepProfile

TAKEN: list[tuple[str, int, dict[str, float]]] = []
IDENTITIES: list[str] = []


class Listed(Tracker):
    """Keeps what it gets in TAKEN."""

    library = "json"

    def __init__(self, run: TrackedRun):
        self.name = run.name
        IDENTITIES.append(run.identity)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        TAKEN.append((self.name, step, dict(values)))

    def close(self) -> None:
        TAKEN.append((self.name, -1, {}))


class Broken(Listed):
    """Fails at the second row."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > 1:
            raise TimeoutError("no answer\nin 30 s")


@pytest.fixture(autouse=True)
def trackers(monkeypatch):
    TAKEN.clear()
    IDENTITIES.clear()
    monkeypatch.setattr(TRACKERS, "_entries", {**dict(TRACKERS.items()), "listed": Listed, "broken": Broken})
    monkeypatch.setattr(_following, "EVERY", 0.05)


def metrics(run: RunRecords, steps: range, seconds: float = 1.0) -> None:
    for step in steps:
        row = {"step": step, "seconds": seconds, "tokens": 32 * step, "train_loss": 5.0 / step, "lr": float("nan")}
        run.append_metrics(row)


def test_a_study_is_tracked_and_traced(study_file, tmp_path, capsys):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines: list[str] = []
    chosen = Watching(trackers={"tensorboard": None, "broken": None}, profile=(2, 4))
    options = {"only": {"transformer++"}, "on": Resources(device="cpu"), "plugins": [], "log": lines.append}
    execute(load_study(str(study_file)), tmp_path / "out", watching=chosen, **options)
    (run,) = StudyRecords(tmp_path / "out").runs()
    assert run.finished and sum("--track broken failed (no answer); the study goes on" in line for line in lines) == 1
    found = accumulator.EventAccumulator(str(tmp_path / "out" / "tracking" / "tensorboard" / run.path.name)).Reload()
    losses = found.Scalars("train/loss")
    rows = run.metrics()
    assert [event.step for event in losses] == [row["step"] for row in rows] == list(range(1, 11))
    assert [event.value for event in losses] == pytest.approx([row["train_loss"] for row in rows])
    evals = {(record.subset, record.metric): record.value for record in run.evals() if record.step == 10}
    last = found.Scalars("domain-loss/code/loss")[-1]
    assert (last.step, last.value) == (10, pytest.approx(evals["code", "loss"]))
    trace = json.loads(gzip.decompress((run.path / "profile" / "steps-2-4.json.gz").read_bytes()))
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert {f"training step {number}" for number in (2, 3, 4)} == {name for name in names if "training step" in name}
    assert "aten::mm" in names or "aten::addmm" in names
    assert [path.name for path in (run.path / "profile").iterdir()] == ["steps-2-4.json.gz"]
    assert any("steps 2 to 4 are traced in" in line for line in lines)
    again = replace(chosen, trackers={}, profile=(10, 12))
    execute(load_study(str(study_file)), tmp_path / "out", watching=again, **options)
    assert "--profile traces no step, as all runs are finished." in lines
    with pytest.raises(ConfigError, match=r"--profile 11:12: the longest run has 10 steps; give earlier ones\."):
        execute(load_study(str(study_file)), tmp_path / "out", watching=replace(again, profile=(11, 12)), **options)


@pytest.mark.parametrize("seen", [True, False], ids=["the shorter file is seen", "the file is longer again"])
def test_a_resumed_run_is_the_same_run_and_no_row_is_sent_twice(seen: bool, tmp_path):
    records = StudyRecords(tmp_path)
    run = records.run("a", 0)
    run.path.mkdir(parents=True)
    with Follower(records, {"listed": None}, "study", print):
        metrics(run, range(1, 4))
    with Follower(records, {"listed": None}, "study", print) as follower:
        follower._each(follower._look)
        run.rewind(2)  # as a resumed run does, which writes the third row again
        if seen:
            follower._each(follower._look)
        metrics(run, range(3, 6), seconds=0.123456)
        whole = (run.path / "metrics.jsonl").read_bytes()
        (run.path / "metrics.jsonl").write_bytes(whole + b'{"step": 6, "trai')  # is being written
    assert [(step, set(values)) for _, step, values in TAKEN if step > 0] == [
        (step, {"train/seconds", "train/tokens", "train/loss"}) for step in range(1, 6)
    ]
    assert len(set(IDENTITIES)) == 1 and len(IDENTITIES) == 2 and sum(step == -1 for _, step, _ in TAKEN) == 2
    with Follower(records, {"listed": None}, "study", print):
        pass
    assert len(IDENTITIES) == 2  # nothing is new, so nothing is begun
    for _ in range(2):  # each fails before it is noted that a row was sent
        with Follower(records, {"broken": None}, "study", print):
            pass
    assert len(IDENTITIES) == 4 and len(set(IDENTITIES)) == 2


def test_of_two_commands_on_a_directory_one_tracks_and_the_other_follows(tmp_path):
    records = StudyRecords(tmp_path)
    run = records.run("a", 0)
    run.path.mkdir(parents=True)
    metrics(run, range(1, 3))
    with Follower(records, {"listed": None}, "study", print):
        while not TAKEN:
            time.sleep(0.01)
        with Follower(records, {"listed": None}, "study", print):
            time.sleep(0.2)
        assert [step for _, step, _ in TAKEN] == [1, 2]
    with Follower(records, {"listed": None}, "study", print):
        metrics(run, range(3, 4))
    assert [step for _, step, _ in TAKEN] == [1, 2, -1, 3, -1]


def test_what_is_not_asked_for_imports_nothing(tmp_path):
    with Follower(StudyRecords(tmp_path), {}, "study", print) as follower:
        assert not follower._thread.is_alive()
    assert watching([], None) == Watching()


def test_options_are_refused_in_a_sentence(monkeypatch):
    assert chosen_trackers(["listed:there:8080", "broken"]) == {"listed": "there:8080", "broken": None}
    with pytest.raises(ConfigError, match=r"unknown tracker 'tensorbord': did you mean 'tensorboard'\?"):
        chosen_trackers(["tensorbord"])
    with pytest.raises(ConfigError, match=r"--track listed is given twice; remove one\."):
        chosen_trackers(["listed", "listed:x"])
    monkeypatch.setattr(_following, "find_spec", lambda name: name)
    for wrong in ("wandb:onlin", "wandb:", "trackio:space", "mlflow:here", "tensorboard:"):
        with pytest.raises(ConfigError, match=f"^--track {wrong}: give .* after the colon, or "):
            chosen_trackers([wrong])
    places = ["wandb:online", "trackio:me/runs", "mlflow:http://host:5000", "tensorboard:C"]
    assert [*chosen_trackers(places).values()] == ["online", "me/runs", "http://host:5000", "C"]
    monkeypatch.setattr(_following, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):
        with pytest.raises(ConfigError, match=rf"--track {name} needs .* {name}; install basecap\[{name}\]\.$"):
            chosen_trackers([name])
    assert (parse_profile("10:13"), parse_profile("7"), parse_profile(None)) == ((10, 13), (7, 7), None)
    for text in ("13:10", "1:17", "0:3", "a", "1:2:3"):
        with pytest.raises(ConfigError, match=f"--profile {text}: give"):
            parse_profile(text)


class Library:
    """Stands for a library: notes every call of a function, and returns itself."""

    def __init__(self):
        self.calls: list[tuple[str, tuple, dict]] = []
        self.experiment_id = self.run_id = "1"
        self.info = self

    def __getattr__(self, name: str):
        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return {"search_runs": [], "get_experiment_by_name": None}.get(name, self)

        return call


@pytest.mark.parametrize(
    ("name", "modules", "first", "logged"),
    [
        ("wandb", ["wandb"], "init", ("log", ({"train/loss": 2.0, "step": 3},), {})),
        ("trackio", ["trackio"], "init", ("log", ({"train/loss": 2.0},), {"step": 3})),
        (
            "mlflow",
            ["mlflow", "mlflow.tracking", "mlflow.entities"],
            "MlflowClient",
            ("Metric", ("train/loss", 2.0, 5000, 3), {}),
        ),
    ],
)
def test_libraries_are_called_offline(name: str, modules: list[str], first: str, logged, tmp_path, monkeypatch):
    library = Library()
    monkeypatch.setattr("time.time", lambda: 5.0)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    for module in modules:
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{
            attribute: getattr(library, attribute) for attribute in ("init", "Settings", "MlflowClient", "Metric")
        }))  # fmt: skip
    run = TrackedRun(
        study="a study", name="mine-s0", identity="ab12cd34", directory=tmp_path / "mine", where=None, about={"seed": 0}
    )
    tracked = TRACKERS.get(name)(run)
    tracked.write(3, {"train/loss": 2.0})
    tracked.flush()
    tracked.close()
    options = next(options for called, _, options in library.calls if called == first)
    offline = {"wandb": ("mode", "offline"), "trackio": ("space_id", None)}
    wanted = offline.get(name, ("tracking_uri", f"sqlite:///{tmp_path}.db"))
    assert options[wanted[0]] == wanted[1] and logged in library.calls
    assert name != "mlflow" or ("log_batch", ("1",), {"metrics": [library]}) in library.calls


class Recorder:
    """Stands for torch's profiler."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text('{"traceEvents": []}')


@pytest.mark.parametrize(("most", "sentence"), [(10, "is left out; trace fewer"), (1000, "are traced in")])
def test_a_trace_that_is_too_large_or_too_late_is_left_out(most: int, sentence: str, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("basecap.train.profile.MOST_BYTES", most)
    monkeypatch.setattr("basecap.train.profile.profile", lambda **options: Recorder())
    lines: list[str] = []
    profile = StepProfile((1, 2), tmp_path / "profile", torch.device("cpu"), lines.append)
    with profile.step(1):
        pass
    profile.close()  # interrupted before the second
    profile.close()
    with StepProfile((1, 2), tmp_path / "profile", torch.device("cpu"), print).step(2):
        pass
    assert "steps 1 to 2 are not traced, as the run resumes with step 2." in capsys.readouterr().out
    assert len(lines) == 1 and sentence in lines[0] and len(list((tmp_path / "profile").iterdir())) == (most > 10)


def test_every_tracker_has_an_extra():
    project = (Path(importlib.import_module("basecap").__file__).parents[1] / "pyproject.toml").read_text()
    for name, entry in TRACKERS.items():
        assert name in ("listed", "broken") or f'{name} = ["{entry.library}' in project
