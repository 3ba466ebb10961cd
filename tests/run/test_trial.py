"""What cannot run fails before anything is trained, and costs the others nothing."""

import logging

import pytest
import torch
import yaml

from basecap.analysis import analyse
from basecap.models.language_model import LanguageModel
from basecap.ops import IMPLEMENTATIONS
from basecap.plan.runs import plan_runs
from basecap.plugins import load_plugin
from basecap.records import StudyRecords
from basecap.report.text_summary import remarks
from basecap.run import jobs, trial
from basecap.run.continue_text import continue_text
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.run.jobs import CONTEXT, Runtime, describe_failure, held_elsewhere
from basecap.run.trial import try_run
from basecap.study.config import load_study, select
from basecap.system.locks import is_locked
from basecap.train.distributed import Processes
from tests.records.made_up import run_info
from tests.run._execute import PLUGIN

#: Name of a mixer -> what its forward returns, and how the message of its failed runs begins.
FORWARDS = {
    "trial shape": ("fail(IndexError) if x.shape[:2] == (4, 32) else x", "IndexError: from a plugin ("),
    "trial evaluation": ("x if self.training else fail(KeyError)", "KeyError: 'from a plugin' ("),
    "trial memory": ("fail(torch.OutOfMemoryError) if len(x) == 4 else x", "4 sequences of 32 tokens do not fit"),
    "trial infinite": ("x / 0", "the loss of a first step is not finite; first bad: module blocks.0.mixer"),
    "trial gradients": ("x + x.sub(x).abs().sqrt()", "the loss of a first step is finite, but its gradients are not"),
    "trial narrow": ("x[..., :1]", "mixer Breaks ("),
    "trial unproved": ("x if len(x) != 9 else fail(ValueError)", "is not proved to see no future (32 tokens, 9 rows"),
    "trial good": ("x * torch.rand_like(x)", None),
}
FAIL = """
def fail(kind):
    raise kind("from a plugin")  # here
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("trials") / "trials.py"
    mixers = [
        PLUGIN.replace('"breaks"', f'"{name}"')
        .replace("self.calls += self.training\n", "\n")
        .replace("x * torch.nan if self.calls >= 3 else x", forward)
        for name, (forward, _) in FORWARDS.items()
    ]
    path.write_text(FAIL + "\n".join(mixers))
    load_plugin(path)
    return path


def test_what_cannot_run_fails_before_anything_trains(study, plugin, tmp_path, caplog):
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    study["train"] |= {"tokens": 512, "eval_every": 512, "micro_batch": 4, "warmup": 2}
    study["seeds"] = [0, 1]
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", *FORWARDS]}))
    config, said = load_study(str(path)), []
    with caplog.at_level(logging.DEBUG, "basecap.study"):
        infos = execute(
            config, out, only=select(config, []), on=Resources(device="cpu"), plugins=[plugin], log=said.append
        )
    failing = {name: begins for name, (_, begins) in FORWARDS.items() if begins is not None}
    unchecked = said.pop(0)  # its dropout breaks no causality, so it trains
    assert unchecked.startswith("trial good fails 1 check of basecap check (repetition: ")
    assert unchecked.endswith(f"run basecap check --mixer 'trial good' --plugin {plugin}; it is trained anyway")
    unchecked = unchecked.removesuffix("; it is trained anyway")  # what reports, and who loads the model, do not say
    (found,) = analyse([out])
    assert found.failed_checks == {"trial good": unchecked.removeprefix("trial good ")}
    assert remarks(found)[0] == f"{unchecked}."
    assert said.pop().startswith("Warning: train.warmup = 2 is not shorter than the run of 2 steps: ")  # once for all
    assert said.pop().startswith("Training continues with transformer++, trial good; press Ctrl-C to stop.")
    assert [line.partition(" failed before training: ")[0] for line in said] == list(failing)  # once for both seeds
    assert len(infos) == 18
    assert "Traceback" in caplog.text and "# here" in caplog.text
    caplog.clear()
    run = StudyRecords(out).run("trial good", 0).path
    continue_text(run, ["the"], 1, temperature=0.0, top_k=None, seed=0, device="cpu")
    assert caplog.messages == [f"{unchecked}."]
    for info in infos:
        records, begins = StudyRecords(out).run(info.name, info.seed), failing.get(info.name)
        assert records.info() == info
        assert info.status == ("finished" if begins is None else "failed")
        assert info.message.startswith(begins or "")
        assert bool(records.metrics()) == (begins is None)
        assert (info.traceback is not None) == (
            (begins is not None and "Error" in begins) or "do not fit" in info.message
        )
    line = 1 + (FAIL + "x").splitlines().index('    raise kind("from a plugin")  # here')
    assert f"IndexError: from a plugin ({plugin}:{line})" in {info.message for info in infos}


def test_what_is_not_proved_trains_if_the_user_allows_it(study, plugin, tmp_path, monkeypatch):
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    study["train"] |= {"tokens": 512, "eval_every": 512}
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "trial unproved"]}))
    config, said, only, written = load_study(str(path)), [], {"trial unproved"}, []
    write = StudyRecords.write_environment

    def watched(records: StudyRecords, environment: dict) -> None:
        written.append(is_locked(records.path))
        write(records, environment)

    monkeypatch.setattr(StudyRecords, "write_environment", watched)
    execute(config, out, only=only, on=Resources(device="cpu"), plugins=[plugin], log=said.append, allow_unproved=True)
    assert len(written) == 4 and all(written)  # else what another command adds meanwhile could be lost
    assert said[0].startswith("trial unproved is not proved to see no future (32 tokens, 9 rows, normal inputs, ")
    assert "; it is trained without, as --allow-unproved says; " in said[0]
    (found,) = analyse([out])
    assert [(run.name, run.status) for run in found.runs] == [("trial unproved", "finished")]
    assert remarks(found)[0] == f"{said[0]}."
    proof = StudyRecords(out).run("trial unproved", 0).info().proof
    assert proof == found.environment["proofs"]["trial unproved"]
    assert "32 tokens, 8 rows, normal inputs, fp32" in proof["covered"]
    assert (proof["layers"], len(proof["unproved"])) == (1, 4)


def test_a_leak_test_that_does_not_fit_stops_what_is_not_allowed(study, plugin, tmp_path, monkeypatch):
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    study["train"] |= {"tokens": 512, "eval_every": 512}
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "trial good"]}))
    config, said = load_study(str(path)), []
    options = {"only": {"trial good"}, "on": Resources(device="cpu"), "plugins": [plugin], "log": said.append}
    monkeypatch.setattr("basecap.testing.trained_model.BUDGET", -1.0)
    (info,) = execute(config, out, **options)
    assert info.status == "failed" and info.message.startswith("is not fully tested for leaks on held-out text (")
    assert info.message.endswith(
        "the -1 s of the test are over and 2 more); repair it, or train it with --allow-unproved"
    )
    (info,) = execute(config, out, **options, allow_unproved=True)
    assert info.status == "finished" and len(info.leak_test["untested"]) == 4
    (found,) = analyse([out])
    assert found.failed_checks["trial good"].endswith("; it is trained without, as --allow-unproved says")
    assert found.runs[0].leak_test.startswith("passed in part, not tested: ")
    (line,) = (line for line in remarks(found) if line.startswith("Leak test of trial good (seed 0) not complete: "))
    assert line.endswith("; it has a verdict as --allow-unproved says.")


@pytest.mark.parametrize(
    ("settings", "room", "compiled", "words"),
    [
        ({"compile": True}, 4, [False, True], ""),
        ({"compile": True}, 0, [False, True], "8 sequences of 32 tokens do not fit into the memory of cpu; lower "),
        ({"compile": False}, 4, [False], "8 sequences of 32 tokens do not fit into the memory of cpu; lower "),
        ({"compile": False, "parallel": "fsdp"}, 4, [False], ""),
    ],
)
def test_a_trial_that_lacks_memory_is_repeated_as_training_needs_it(settings, room, compiled, words, study, tmp_path):
    """Of two processes each has four gigabytes, of which an uncompiled step needs eight, and a compiled one four."""
    taken, said = [], []

    def training_step(model, optimiser, run, placement):
        taken.append(model.compiled)
        if room < (4 if model.compiled else 8):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.")

    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study | {"train": study["train"] | {"batch": 16, **settings}}))
    run, *_ = plan_runs(load_study(str(path)), 257)
    runtime = Runtime(
        records=StudyRecords(tmp_path),
        device=torch.device("cpu"),
        workloads={None: None},
        evaluations=(),
        group=Processes(world=2),
        log=said.append,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trial, "training_step", training_step)
        patched.setattr(trial, "_update", lambda *arguments: None)
        patched.setattr(LanguageModel, "compile_training", lambda model: setattr(model, "compiled", True))
        failure = try_run(run, runtime).failure
    assert taken == compiled and (words == "") == (failure is None)
    assert failure is None or failure.message.startswith(words)
    untried = ["transformer++ trains without a trial step, as one process has no room for the whole model."]
    assert said == (untried if "parallel" in settings else [])


HELD = "cuda:0 had 5.0 of 20.0 GiB free, as other processes hold the rest; the same command tries again."


FULL = "cuda:0 had none free, as other processes hold it; the same command tries again."


@pytest.mark.parametrize(("free", "words"), [(1, HELD), (None, FULL), (14, None)])
def test_a_gpu_that_others_fill_is_named(free, words, monkeypatch):
    def mem_get_info(device):
        if free is None:
            raise RuntimeError("CUDA error: out of memory")
        return free * CONTEXT, 20 * CONTEXT

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * CONTEXT)
    gpu = torch.device("cuda", 0)
    assert held_elsewhere(gpu) == words and held_elsewhere(torch.device("cpu")) is None
    for error, lacks in ((torch.OutOfMemoryError("CUDA out of memory."), True), (MemoryError("no room"), False)):
        message = describe_failure(error, gpu).message
        assert message == (f"out of memory: {words}" if words and lacks else f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("name", "when", "message"),
    [
        (
            "held-early",
            "True",
            f"failed before training: 8 sequences of 32 tokens do not fit into the memory of cpu: {HELD}",
        ),
        ("held-late", 'list(OUT.glob("runs/*/metrics.jsonl"))', f"(seed 0) failed: out of memory: {HELD}"),
    ],
)
def test_a_run_whose_memory_others_hold_says_so_and_the_same_command_continues_it(
    name, when, message, study, tmp_path, monkeypatch
):
    path, out, full, plugin = (tmp_path / file for file in ("tiny.yaml", "out", "full", "held.py"))
    for module in (jobs, trial):
        monkeypatch.setattr(module, "held_elsewhere", lambda device: HELD)
    held = PLUGIN.replace('"breaks"', f'"{name}"').replace("x * torch.nan", "fail(torch.OutOfMemoryError)")
    held = held.replace("self.calls >= 3", f"self.training and FULL.exists() and {when}")
    plugin.write_text(f"from pathlib import Path\nOUT, FULL = Path({str(out)!r}), Path({str(full)!r})\n{FAIL}{held}")
    load_plugin(plugin)
    path.write_text(yaml.safe_dump(study | {"architectures": [name], "reference": name, "evals": ["domain-loss"]}))
    config, on = load_study(str(path)), Resources(device="cpu")

    def command():
        said = []
        return execute(config, out, only={name}, on=on, plugins=[plugin], log=said.append, allow_unproved=True), said

    full.touch()
    (info,), said = command()
    assert info.status == "failed" and f"{name} {message}" in said and "OutOfMemoryError" in info.traceback
    full.unlink()
    (info,), said = command()
    assert info.status == "finished" and not info.message and not any("failed" in line for line in said)


def test_a_trial_leaves_nothing_behind(study, plugin, tmp_path, monkeypatch):
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    study["train"] |= {"tokens": 512, "eval_every": 512}
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "trial good"]}))
    config, states = load_study(str(path)), []

    def attempt(run, runtime):
        states.append((torch.get_rng_state(), dict(IMPLEMENTATIONS)))
        return run_info(run.name, seed=run.seed)

    monkeypatch.setattr("basecap.run.executors.in_process.train_run", attempt)
    monkeypatch.setitem(IMPLEMENTATIONS, "kept", "as it was")
    before, held = torch.get_rng_state(), dict(IMPLEMENTATIONS)
    execute(config, out, only=select(config, []), on=Resources(device="cpu"), plugins=[plugin], log=print)
    assert [ops for _, ops in states] == [held, held]
    assert all(torch.equal(state, before) for state, _ in states)
