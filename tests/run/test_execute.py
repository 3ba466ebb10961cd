"""Running a study: complete records, resume, runs side by side, failures that stay where they are."""

import contextlib
import json
import os
import pkgutil
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml
from torch.distributed.launcher import LaunchConfig, elastic_launch

from basecap.errors import ConfigError, DataError, LostDirectory
from basecap.plan.workloads import recorded_data
from basecap.plugins import load_plugin
from basecap.records import StudyRecords
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.study.config import StudyConfig, load_study, select
from basecap.system import processes
from tests.forks import FORKS, command, pair, start
from tests.records.made_up import change
from tests.run._execute import ALONE, PLUGIN, run
from tests.small_study import write_text


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Return a list that gets an entry for each call of the function called `name`."""
    calls, function = [], pkgutil.resolve_name(name)
    monkeypatch.setattr(name, lambda *arguments: calls.append(name) or function(*arguments))
    return calls


def losses(out: Path) -> dict[str, list[float]]:
    return {found.info().name: [row["train_loss"] for row in found.metrics()] for found in StudyRecords(out).runs()}


def test_a_study_leaves_complete_records(study_file, tmp_path, monkeypatch):
    shown: list[str] = []

    @contextlib.contextmanager
    def progress(label, total, unit, pauses=None):
        yield lambda n, note="": shown.append(note)

    monkeypatch.setattr("basecap.train.loop.progress", progress)
    opened = counted(monkeypatch, "basecap.plan.workloads.prepare")
    infos = run(study_file, tmp_path / "out")
    merged = counted(monkeypatch, "basecap.run.start.merge_studies")
    assert run(study_file, tmp_path / "out") == infos and (len(opened), len(merged)) == (2, 1)  # once a command
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
    settings = ("train.tokens=512",)
    run(study_file, tmp_path / "out", settings, only=("transformer++",))
    assert set(losses(tmp_path / "out")) == {"transformer++"}
    first = losses(tmp_path / "out")["transformer++"]
    records = StudyRecords(tmp_path / "out")
    former = records.study()
    former["train"]["seeds"] = former.pop("seeds")  # as archived records have it
    former["gap"]["tolerance"] = 0.02
    records.create(former)
    run(study_file, tmp_path / "out", settings)
    assert yaml.safe_load((records.path / "study.yaml").read_text())["seeds"] == [0]
    assert set(losses(tmp_path / "out")) == {"transformer++", "window 4"}
    assert losses(tmp_path / "out")["transformer++"] == first


def test_a_killed_process_costs_its_own_run_alone(study, tmp_path, quick_workers):
    """Killed in a trial step, which costs an architecture its runs, or while it trains, which costs the run.

    What lacks memory beside others, or may have, starts again when they have ended, a trial step as well as a run:
    "crowded" succeeds then, "killed" and "early" do not.
    """
    plugin, path, out = tmp_path / "killed.py", tmp_path / "tiny.yaml", tmp_path / "out"
    fatal = PLUGIN.replace("x * torch.nan", "os.kill(os.getpid(), 9)")  # as the system does when memory is short
    killed = fatal.replace('"breaks"', '"killed"').replace(
        "self.calls >= 3", "WORKS and not self.training and self.calls >= 2"
    )
    killed = killed.replace("self.calls += 1", "self.calls += self.training")  # once in the trial
    early = fatal.replace('"breaks"', '"early"').replace("self.calls >= 3", "WORKS")
    crowded = PLUGIN.replace('"breaks"', '"crowded"').replace(
        "x * torch.nan if self.calls >= 3 else x", "lack(self) or x"
    )
    full, tried = tmp_path / "full", tmp_path / "tried"
    head = f"""
import multiprocessing, os
from pathlib import Path
WORKS, FULL, TRIED = multiprocessing.parent_process() is not None, Path({str(full)!r}), Path({str(tried)!r})

def lack(mixer):
    here = FULL if mixer.calls >= 3 else TRIED
    if WORKS and mixer.training and not here.exists():
        here.touch()
        raise MemoryError("no room")
"""
    plugin.write_text(head + killed + early + crowded)
    names = ["crowded", "transformer++", "early", "killed"]
    changes = {"architectures": names, "reference": "transformer++", "evals": ["domain-loss"]}
    path.write_text(yaml.safe_dump(study | changes))
    load_plugin(plugin)
    config, said = load_study(str(path)), []
    only = select(config, [])
    infos = execute(config, out, only=only, on=Resources(device="cpu", per_device=2), plugins=[plugin], log=said.append)
    statuses = [("early", "failed"), ("crowded", "finished"), ("transformer++", "finished"), ("killed", "failed")]
    assert full.exists() and [(info.name, info.status) for info in infos] == statuses
    recorded = {found.info().name: found.info() for found in StudyRecords(out).runs()}
    assert recorded == {info.name: info for info in infos}
    lacking, killing = "found too little memory", "was killed, possibly out of memory,"
    again = "beside others; it starts again when one of them has ended."
    trials = [f"crowded: its trial step {lacking} {again}", f"early: its trial step {killing} {again}"]
    assert sorted(said[:2]) == trials
    assert said[2].startswith("crowded fails ") and said[3].startswith("killed fails ")  # they lack decoding
    assert said[5].startswith("Training continues with crowded, transformer++, killed; ")
    assert [said[4], *sorted(said[6:8]), *said[8:]] == [
        f"early failed before training: {recorded['early'].message}",
        f"crowded (seed 0) {lacking} {again}",
        f"killed (seed 0) {killing} {again}",
        f"killed (seed 0) failed: {recorded['killed'].message}",
    ]
    assert all("was killed, possibly out of memory" in recorded[name].message for name in ("early", "killed"))
    *others, last = (len(losses(out)[name]) for name, _ in statuses)
    # The second try resumes from step 2 if that checkpoint was complete, and is killed at its first evaluation point.
    assert others == [0, 10, 10] and last in (2, 4)


def mover(tmp_path: Path, name: str, head: str, call: str) -> tuple[Path, Path, Path]:
    """Write a plugin whose mixer makes a call in its second training step; return its OUT and OTHER, and the plugin."""
    plugin, out, other = (tmp_path / place for place in ("mover.py", "out", "other"))
    mixer = PLUGIN.replace('"breaks"', f'"{name}"').replace("x * torch.nan", f"({call}, x)[1]")
    mixer = mixer.replace("self.calls >= 3", f'list(OUT.glob("runs/{name}-s0/metrics.jsonl"))')
    places = f"from pathlib import Path\nOUT, OTHER = Path({str(out)!r}), Path({str(other)!r})\n"
    plugin.write_text(places + head + mixer)
    load_plugin(plugin)
    return out, other, plugin


def test_a_study_whose_directory_is_moved_stops_and_resumes_there(study, tmp_path):
    out, other, plugin = mover(tmp_path, "mover", "", "OUT.rename(OTHER)")
    path, names = tmp_path / "tiny.yaml", {"architectures": ["mover"], "reference": "mover"}
    path.write_text(yaml.safe_dump(study | names | {"evals": ["domain-loss"]}))
    config, said = load_study(str(path)), []
    options = {"only": {"mover"}, "plugins": [plugin], "on": Resources(device="cpu"), "log": said.append}
    with pytest.raises(LostDirectory) as stopped:
        execute(config, out, **options)
    where = f"as {out} was moved to {other} while it was in use; run again with --out {other}."
    assert str(stopped.value) == f"mover (seed 0): stopped at step 2 of 10 with a checkpoint, {where}"
    assert not out.exists() and StudyRecords(other).run("mover", 0).info().status == "running"
    (info,) = execute(config, other, **options)
    assert info.status == "finished" and "mover (seed 0): resumed at step 2 of 10." in said


def test_every_run_side_by_side_says_where_the_directory_was_moved(study, tmp_path, quick_workers):
    """One process moves it in a step while the other is past its last step and has not recorded that yet."""
    head = """
import multiprocessing, time
from basecap.run import leak_test
from basecap.run.executors import _worker

def wait(until):
    while not until():
        time.sleep(0.01)

def move():
    wait((OUT.parent / "ended").exists)
    OUT.rename(OTHER)

def write_line(line):
    with (OUT.parent / "lines").open("a") as file:
        file.write(line + "\\n")

def held(*given, find=leak_test.find_leaks, **options):
    (OUT.parent / "ended").touch()
    wait(OTHER.exists)
    return find(*given, **options)

if multiprocessing.parent_process() is not None:
    leak_test.find_leaks, _worker.write_line = held, write_line
"""
    out, other, plugin = mover(tmp_path, "patient", head, "move()")
    path, names = tmp_path / "tiny.yaml", ["patient", "transformer++"]
    path.write_text(yaml.safe_dump(study | {"architectures": names, "evals": ["domain-loss"]}))
    config = load_study(str(path))
    options = {"only": select(config, []), "plugins": [plugin], "log": lambda line: None}
    with pytest.raises(LostDirectory) as stopped:
        execute(config, out, on=Resources(device="cpu", per_device=2), **options)
    where = f"{out} was moved to {other} while it was in use; run again with --out {other}."
    assert str(stopped.value) == where and not out.exists()
    assert sorted((tmp_path / "lines").read_text().splitlines()) == [
        f"patient (seed 0): stopped at step 2 of 10 with a checkpoint, as {where}",
        f"transformer++ (seed 0): stopped at step 10 of 10 with a checkpoint, as {where}",
    ]
    infos = execute(config, other, on=Resources(device="cpu"), **options)
    assert [(info.name, info.status) for info in infos] == [(name, "finished") for name in names]


def test_a_directory_takes_more_seeds_and_architectures(study, tmp_path):
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    study["train"] |= {"tokens": 512}
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
    given = {"settings": ("train.tokens=512",), "only": ("transformer++",)}
    path = tmp_path / "out" / "environment.json"
    run(study_file, tmp_path / "out", **given)
    change(path, device="NVIDIA H200")
    run(study_file, tmp_path / "out", **given)
    assert json.loads(path.read_text())["device"] == "NVIDIA H200"
    shutil.rmtree(tmp_path / "out" / "runs")
    run(study_file, tmp_path / "out", **given)
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


def with_quick_workers(*arguments: object) -> None:
    """Run the command line; its workers are forks."""
    processes.START_METHOD = FORKS.get_start_method()
    command(*arguments)


def test_an_interrupted_command_with_runs_side_by_side_resumes_with_the_same_curves(study, tmp_path):
    study["train"] |= {"tokens": 20_480, "eval_every": 10_240}
    path, out, output = tmp_path / "tiny.yaml", tmp_path / "stopped", tmp_path / "output"
    path.write_text(yaml.safe_dump(study))
    arguments = ("run", path, "--device", "cpu", "--per-device", "2", "--out", out)
    stopped = start(with_quick_workers, *arguments, output=output, OMP_NUM_THREADS="1")
    deadline = time.monotonic() + 240
    while len(losses(out)) < 2 or not all(losses(out).values()):
        assert stopped.is_alive() and time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    os.kill(stopped.pid, signal.SIGTERM)
    stopped.join(60)
    err = output.read_text()
    assert stopped.exitcode == 143 and err.endswith("interrupted; run the same command again to resume.\n")
    assert {found.info().status for found in StudyRecords(out).runs()} == {"running"}
    before = {found.info().name: found.info().seconds["steps"] for found in StudyRecords(out).runs()}
    steps = {name: len(rows) for name, rows in losses(out).items()}
    for name, count in steps.items():
        stop = f"{name} (seed 0): stopped at step {count} of 80 with a checkpoint; run the same command again"
        assert err.splitlines().count(f"{stop} to resume.") == 1
    config, said = load_study(str(path)), []
    infos = execute(config, out, only=select(config, []), on=Resources(device="cpu"), plugins=(), log=said.append)
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


def test_misplaced_and_damaged_runs_are_found_before_anything_is_trained(study_file, tmp_path):
    out, settings = tmp_path / "out", ("train.tokens=512",)
    run(study_file, out, settings, only=("transformer++",))
    place = StudyRecords(out).run("transformer++", 0).path
    aside = place.rename(out / "runs" / "first")
    with pytest.raises(DataError, match=r"does not exist; rename .*/first to transformer\+\+-s0\."):
        run(study_file, out, settings)
    documents = next(aside.rename(place).glob("documents/*.losses"))
    documents.write_bytes(documents.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"losses lacks the losses at step .*; remove .*transformer\+\+-s0 to train it"):
        run(study_file, out, settings)
    assert set(losses(out)) == {"transformer++"}


def launch(*arguments: object) -> None:
    """Run the command line in two processes under torchrun's launcher."""
    config = LaunchConfig(
        1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork"
    )
    elastic_launch(config, command)(*arguments)


def test_an_error_in_one_of_two_processes_does_not_leave_the_other_waiting(study, tmp_path):
    plugin, path = tmp_path / "alone.py", tmp_path / "tiny.yaml"
    plugin.write_text(ALONE)
    names = [*study["architectures"], "alone"]
    path.write_text(yaml.safe_dump(study | {"architectures": names, "evals": ["domain-loss", "fails-once"]}))
    arguments = ("run", "--device", "cpu", path, "--out", tmp_path / "out", "--plugin", plugin)
    launcher = start(launch, *arguments, output=tmp_path / "output")
    launcher.join(200)
    printed = (tmp_path / "output").read_text()
    assert launcher.exitcode == 1, printed[-3000:]
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
    assert printed.count("transformer++ (seed 0) failed: RuntimeError: this evaluation cannot") == 1
    assert printed.count("alone (seed 0) failed in process 1, which ends all processes (--only") == 1


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
