"""What each architecture must pass before a study trains: causality, one training step, one evaluation batch."""

import gc
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from basecap.data.workload import Workload
from basecap.errors import BasecapError, ConfigError, TrainingError
from basecap.evals import Context, Evaluation
from basecap.mixers import ARCHITECTURES
from basecap.models import BACKBONES
from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel
from basecap.ops import IMPLEMENTATIONS
from basecap.plan.runs import RunSpec
from basecap.records import RunInfo, StudyRecords
from basecap.run.jobs import Failure, Runtime, describe_failure, lacks_memory, report_failure
from basecap.run.provenance import plugin_files, seen_from_here, starting_info
from basecap.system.progress import progress
from basecap.testing.check_mixer import LONGEST as CHECKED
from basecap.testing.check_mixer import check_mixer
from basecap.testing.check_model import LONGEST, Precision, find_leak, undisturbed
from basecap.train.checkpoint import latest
from basecap.train.diagnose import first_bad_module
from basecap.train.distributed import Processes, error_sentence
from basecap.train.loop import DevicePlacement
from basecap.train.optim import build_optimiser, clip_gradients

#: Length of the sequences of the conformance checks before training.
SHORT = 64

#: Tries runs and yields each of them with why it cannot train, None where it can.
Attempt = Callable[[Sequence[RunSpec]], Iterable[tuple[RunSpec, Failure | None]]]


def untried(runs: Sequence[RunSpec], records: StudyRecords) -> list[RunSpec]:
    """Return a run of each architecture none of whose runs has finished or has a checkpoint."""
    begun = set()
    for run in runs:
        found = records.run(run.name, run.seed, run.rate)
        if found.finished or latest(found.resume) is not None:
            begun.add(run.architecture)
    first = {run.architecture: run for run in reversed(runs) if run.architecture not in begun}
    return list(first.values())[::-1]


def try_new(runs: Sequence[RunSpec], runtime: Runtime, attempt: Attempt) -> list[RunInfo]:
    """Try each architecture that has not started; record and log failures, and return the infos of their runs.

    Args:
        runs: of the study.
        runtime: of this process.
        attempt: tries runs, in this process or in several.
    """
    trials, found = untried(runs, runtime.records), {}
    with progress("trial steps", total=len(trials), unit="architectures") as advance:
        for run, failure in attempt(trials):
            found[run.architecture] = failure
            advance(1, note=run.architecture)
    faults = {run.architecture: failed_checks(run, runtime.device) for run in trials if not found[run.architecture]}
    for name, fault in faults.items():
        if fault is not None:
            runtime.log(f"{name} {fault}")
    _record(faults, runtime.records)
    names = [run.architecture for run in trials]
    failures = {name: failure for name in names if (failure := found[name]) is not None}
    infos = []
    for run in (run for run in runs if run.architecture in failures):
        failure, records = failures[run.architecture], runtime.run_records(run)
        started = replace(starting_info(records, run, runtime.device), ops=failure.ops)
        info = started.failed(failure.message, failure.traceback)
        records.write_info(info)
        infos.append(info)
    for name, failure in failures.items():
        report_failure(f"{name} failed before training", failure, runtime.log)
    unfinished = [run for run in runs if not runtime.run_records(run).finished]
    others = dict.fromkeys(run.architecture for run in unfinished if run.architecture not in failures)
    if failures and others:
        runtime.log(
            f"Training continues with {', '.join(others)}; press Ctrl-C to stop. The same command resumes it, "
            "and tries again what failed."
        )
    return infos


def _record(faults: Mapping[str, str | None], records: StudyRecords) -> None:
    """Write into environment.json what is wrong with each architecture, for the report; None removes its entry."""
    held = records.environment()
    before = held.get("failed_checks", {})
    found = {name: fault for name, fault in (before | faults).items() if fault is not None}
    if found != before:
        records.write_environment(held | {"failed_checks": found})


def try_run(run: RunSpec, runtime: Runtime) -> Failure | None:
    """Try one run in this process alone, as one of its group would train it; return why it cannot train.

    Random generators, the record of ops and the device's memory are left as they were.
    """
    placement, failure = DevicePlacement.choose(runtime.device, runtime.group, run.train.precision), None
    with undisturbed(placement.device):
        try:
            _run(run, runtime.evaluations, runtime.workloads[run.task], placement)
        except (Exception, SystemExit) as error:  # a fault of one architecture must not cost the others
            failure = replace(describe_failure(error), ops=dict(sorted(IMPLEMENTATIONS.items())))
            if lacks_memory(error_sentence(error)):
                failure = replace(failure, message=_memory_message(run, placement))
    if failure is not None:
        gc.collect()  # its traceback kept the model alive in a reference cycle
    if placement.device.type == "cuda":
        torch.cuda.empty_cache()
    return failure


def _run(run: RunSpec, evaluations: Sequence[Evaluation], workload: Workload, placement: DevicePlacement) -> None:
    """Train the study's model on one micro-batch of random tokens, uncompiled, and evaluate it on a batch each."""
    model = LanguageModel(run.model, checkpointing=run.train.checkpointing).initialise(run.seed).to(placement.device)
    training_step(model, build_optimiser(model, model.recipe(), run.train), run, placement)
    model.eval()
    context = Context(data=workload, device=placement.device, autocast=placement.autocast)
    with torch.no_grad():
        for evaluation in evaluations:
            evaluation.trial(model, context)


def training_step(model: LanguageModel, optimiser: Optimizer, run: RunSpec, placement: DevicePlacement) -> None:
    """Update a model once, on one micro-batch of random tokens; raises TrainingError where a number is not finite."""
    optimiser.zero_grad(set_to_none=True)
    shape = (run.train.forward_batch(placement.processes.world), run.length + 1)
    tokens = torch.randint(run.model.vocab, shape, generator=torch.Generator().manual_seed(0)).to(placement.device)
    with placement.autocast():
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    norm = clip_gradients(model, run.train)
    if not math.isfinite(loss.item()):
        with placement.autocast():
            where = first_bad_module(model, tokens[:, :-1], tokens[:, 1:])
        raise TrainingError(f"the loss of a first step is not finite; first bad: {where or 'not found again'}.")
    if not math.isfinite(norm.item()):
        raise TrainingError(
            "the gradients of a first step are not finite, where the loss is; correct the backward pass."
        )
    optimiser.step()


def _memory_message(run: RunSpec, placement: DevicePlacement) -> str:
    rows = run.train.forward_batch(placement.processes.world)
    return (
        f"{rows} sequences of {run.length} tokens do not fit into the memory of {placement.device}"
        f"{_held_elsewhere(placement.device)}; lower train.micro_batch or set train.checkpointing=true."
    )


def _held_elsewhere(device: torch.device) -> str:
    """Say how much of a GPU's memory other processes hold; "" where that is little."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device)
    return f" ({held / total:.0%} is held by other processes)" if held > total / 10 else ""


def refuse_leaks(runs: Sequence[RunSpec], device: torch.device) -> None:
    """Raise ConfigError when an architecture that is not built in leaks from later tokens or between packed documents.

    Those that are built in are proved by the tests, and by `basecap check` with the kernels of this machine.
    """
    for run in {run.architecture: run for run in runs if not _built_in(run.model)}.values():
        placement = DevicePlacement.choose(device, Processes(), run.train.precision)
        training = Precision(autocast=placement.autocast, bf16=placement.bf16, rows=run.train.forward_batch(1))
        with undisturbed(device):
            fault = find_leak(run.model, device, training)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if fault is not None:
            raise ConfigError(f"mixer {run.architecture!r} ({_places(run.model)}) {fault}; run {_command(run)}")


def failed_checks(run: RunSpec, device: torch.device) -> str | None:
    """Return which checks of `basecap check` a run's mixers from plugins fail, None where they pass.

    They do not stop a study, as no verdict depends on them: a leak, which would, is refused by `refuse_leaks`. Only the
    float64 checks on short sequences run here: less than a second for most mixers.
    """
    broken: list[str] = []
    for name in () if _built_in(run.model) else _checked_names(run.model):
        try:
            with undisturbed(device):
                report = check_mixer(name, length=SHORT, longest=0, dtypes=(), device=device)
            broken += [f"{check.name}: {check.broken}" for check in report.failures]
        except BasecapError as error:  # such as a default that does not fit the small model of the checks
            return f"cannot be checked: {error}"
    if not broken:
        return None
    count = f"{len(broken)} check{'s' if len(broken) > 1 else ''}"
    return f"fails {count} of basecap check ({broken[0]}); it is trained anyway; for details run {_command(run)}"


def _built_in(config: ModelConfig) -> bool:
    """Whether no part of a model comes from a plugin file or from another package."""
    return BACKBONES.built_in(config.backbone) and all(ARCHITECTURES.built_in(layer.use) for layer in config.layers)


def _places(config: ModelConfig) -> str:
    """Return file:line of what is not built in."""
    uses = dict.fromkeys(layer.use for layer in config.layers if not ARCHITECTURES.built_in(layer.use))
    places = [ARCHITECTURES.origin(use) for use in uses]
    if not BACKBONES.built_in(config.backbone):
        places.append(BACKBONES.origin(config.backbone))
    return ", ".join(places)


def _command(run: RunSpec) -> str:
    """Return the command that shows the details."""
    options = [("--mixer", name) for name in _checked_names(run.model)]
    options += [("--plugin", str(seen_from_here(file))) for file in plugin_files(run.model)]
    if run.model.max_length > CHECKED:
        options.append(("--length", str(min(run.model.max_length, LONGEST))))
    return shlex.join(["basecap", "check", *(word for option in options for word in option)])


def _checked_names(config: ModelConfig) -> list[str]:
    """Return the names that `basecap check` takes for a model: those of plugins, or all without plugins."""
    uses = list(dict.fromkeys(layer.use for layer in config.layers))
    return [
        use if ARCHITECTURES.get(use).backbone == config.backbone else f"{use} in {config.backbone}"
        for use in [use for use in uses if not ARCHITECTURES.built_in(use)] or uses
    ]
