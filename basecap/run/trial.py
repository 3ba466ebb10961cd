"""What each architecture must pass before a study trains: causality, one training step, one evaluation batch."""

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from basecap.data.workload import Workload
from basecap.errors import ConfigError, TrainingError
from basecap.evals import Context, Evaluation
from basecap.evals.domain_loss import DomainLoss
from basecap.models.language_model import LanguageModel
from basecap.ops import IMPLEMENTATIONS
from basecap.plan.runs import RunSpec
from basecap.records import RunInfo, StudyRecords
from basecap.run import threads
from basecap.run.jobs import (
    NO_ROOM,
    JobFailure,
    Runtime,
    Trial,
    describe_failure,
    free_memory,
    held_elsewhere,
    lacks_memory,
    report_failure,
    varying_operation,
)
from basecap.run.proofs import Doubt, doubt
from basecap.run.provenance import starting_info
from basecap.system.progress import progress
from basecap.testing.check_model import built_in
from basecap.testing.subject import undisturbed
from basecap.testing.trained_model import find_leaks_untrained
from basecap.train.checkpoint import latest
from basecap.train.deterministic import deterministic
from basecap.train.diagnose import first_bad_module
from basecap.train.distributed import error_sentence
from basecap.train.optim import build_optimiser, clip_gradients, set_learning_rate
from basecap.train.placement import DevicePlacement, compiles_on, start_compilers

Found = TypeVar("Found")
#: Tries runs and yields each of them with what was found.
Attempt = Callable[[Sequence[RunSpec]], Iterable[tuple[RunSpec, Trial]]]


def untried(runs: Sequence[RunSpec], records: StudyRecords) -> list[RunSpec]:
    """Return a run of each architecture none of whose runs has finished or has a checkpoint."""
    begun = set()
    for run in runs:
        found = records.run(run.name, run.seed, run.rate)
        if found.finished or latest(found.resume) is not None:
            begun.add(run.architecture)
    first = {run.architecture: run for run in reversed(runs) if run.architecture not in begun}
    return list(first.values())[::-1]


def try_new(runs: Sequence[RunSpec], runtime: Runtime, attempt: Attempt, allow_unproved: bool = False) -> list[RunInfo]:
    """Try each architecture that has not started; record and log failures, and return the infos of their runs.

    Args:
        runs: of the study.
        runtime: of this process.
        attempt: tries runs, in this process or in several.
        allow_unproved: whether architectures train, and have a verdict, of which nothing proves that they see no
            future.

    Raises:
        ConfigError: train.deterministic, and an architecture with an operation that has no deterministic form.
    """
    if allow_unproved:
        _allow({run.architecture for run in runs if not built_in(run.model)}, runtime.records)
    trials, tried = untried(runs, runtime.records), dict[str, Trial]()
    with progress("trial steps", total=len(trials), unit="architectures") as advance:
        for run, trial in attempt(trials):
            tried[run.architecture] = trial
            advance(1, note=run.architecture)
    found = {name: trial.failure for name, trial in tried.items()}
    _refuse_varying(found, runtime.device)
    if runtime.device.type == "cpu":
        timed = {name: trial.step_seconds for name, trial in tried.items() if trial.failure is None}
        threads.record_choice(timed, runtime.records, runtime.log)
    sound = [run for run in trials if not found[run.architecture]]
    untested = {name: trial.untested for name, trial in tried.items()}
    doubts = _doubts(sound, runtime, untested, allow_unproved)
    found |= {name: JobFailure(message=held.words) for name, held in doubts.items() if held is not None and held.stops}
    names = [run.architecture for run in trials]
    failures = {name: failure for name in names if (failure := found[name]) is not None}
    infos = []
    for run in (run for run in runs if run.architecture in failures):
        failure, records = failures[run.architecture], runtime.run_records(run)
        started = replace(starting_info(records, run, runtime.device), ops=failure.ops)
        info = started.failed(failure.message, failure.traceback)
        with runtime.records.claimed(records) as mine:
            if mine:  # else another command trains it
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


def _refuse_varying(found: Mapping[str, JobFailure | None], device: torch.device) -> None:
    """Raise ConfigError for architectures that failed as an operation has no deterministic form on this device."""
    failed = {name: failure.message for name, failure in found.items() if failure is not None}
    varying = {name: what for name, message in failed.items() if (what := varying_operation(message)) is not None}
    if varying:
        names = " and ".join(f"{name!r} ({what})" for name, what in varying.items())
        raise ConfigError(
            f"train.deterministic: {names} needs an operation of which PyTorch has no deterministic form on "
            f"{device.type}; leave it out with --only, or set train.deterministic=false and another --out."
        )


def _doubts(
    runs: Sequence[RunSpec], runtime: Runtime, untested: Mapping[str, Sequence[str]], allowed: bool
) -> dict[str, Doubt | None]:
    """Return what speaks against training each run's architecture; log and record it where that trains."""
    proofs = runtime.records.environment().get("proofs", {})
    doubts = {run.architecture: doubt(run, runtime.device, proofs, untested[run.architecture], allowed) for run in runs}
    faults = {name: None if held is None or held.stops else held.words for name, held in doubts.items()}
    for name, held in doubts.items():
        if held is not None and not held.stops:
            runtime.log(f"{name} {held.words}{'; it is trained anyway' if held.anyway else ''}")
    _record(faults, runtime.records)
    return doubts


def _record(faults: Mapping[str, str | None], records: StudyRecords) -> None:
    """Write into environment.json what is wrong with each architecture, for the report; None removes its entry."""
    with records.locked():  # another command may write what it has found meanwhile
        held = records.environment()
        before = held.get("failed_checks", {})
        found = {name: fault for name, fault in (before | faults).items() if fault is not None}
        if found != before:
            records.write_environment(held | {"failed_checks": found})


def _allow(names: set[str], records: StudyRecords) -> None:
    """Write into environment.json which architectures have a verdict even where their leak test is not complete."""
    with records.locked():
        held = records.environment()
        before = held.get("allowed_unproved", [])
        if names - {*before}:
            records.write_environment(held | {"allowed_unproved": sorted({*before, *names})})


def try_run(run: RunSpec, runtime: Runtime) -> Trial:
    """Try one run in this process alone, as one of its group would train it.

    Its steps are timed on a CPU, unless the study has its threads. Random generators, the record of ops and the
    device's memory are left as they were.
    """
    start_compilers(runtime.device, run.train)
    placement = DevicePlacement.choose(runtime.device, runtime.group, run.train.precision)
    trial, failure, raised = Trial(), None, False
    with undisturbed(placement.device), threads.recorded(run, runtime.records, placement.device) as held:
        try:
            with deterministic(run.train, placement.device):
                rest = runtime.evaluations, runtime.workloads[run.task], placement
                trial = in_memory(run, placement.device, partial(_run, run, *rest, timed=held is None))
        except (Exception, SystemExit) as error:  # a fault of one architecture must not cost the others
            failure = replace(describe_failure(error, placement.device), ops=dict(sorted(IMPLEMENTATIONS.items())))
            if lacks_memory(error_sentence(error)):
                failure = _memory_failure(failure, run, placement, runtime.log)
            raised = True
    if raised:
        gc.collect()  # the traceback kept the model alive in a reference cycle
    free_memory(placement.device)
    return replace(trial, failure=failure)


def in_memory(run: RunSpec, device: torch.device, attempt: Callable[[bool], Found]) -> Found:
    """Return what `attempt(False)` finds with uncompiled code, which takes no time to compile.

    That may need twice the memory of compiled code. Where it finds too little, and the run trains with compiled code,
    return what `attempt(True)` finds with that.
    """
    try:
        return attempt(False)
    except Exception as error:
        if not (compiles_on(device, run.train) and lacks_memory(error_sentence(error))):
            raise
    gc.collect()  # the traceback kept the model alive in a reference cycle
    free_memory(device)
    return attempt(True)


def build(run: RunSpec, device: torch.device, *, compiled: bool) -> tuple[LanguageModel, Optimizer]:
    """Return the model of a run on a device, as it trains in one process but not always compiled, and its optimiser."""
    model = LanguageModel(run.model, checkpointing=run.train.checkpointing).initialise(run.seed).to(device)
    if compiled:
        model.compile_training()
    return model, build_optimiser(model, model.recipe(), run.train)


def _run(
    run: RunSpec,
    evaluations: Sequence[Evaluation],
    workload: Workload,
    placement: DevicePlacement,
    compiled: bool,
    *,
    timed: bool,
) -> Trial:
    """Train the study's model on one micro-batch of random tokens, and evaluate it on a batch each."""
    model, optimiser = build(run, placement.device, compiled=compiled)
    training_step(model, optimiser, run, placement)
    model.eval()
    context = Context(data=workload, device=placement.device, autocast=placement.autocast)
    with torch.no_grad():
        for evaluation in evaluations:
            evaluation.trial(model, context)
    measured = next((found for found in evaluations if isinstance(found, DomainLoss)), None)
    untested: tuple[str, ...] = ()
    if run.task is None and measured is not None and not built_in(run.model):
        leaks = find_leaks_untrained(model, measured, context, int(run.hash, 16))
        if leaks.leaks and not leaks.raised:
            raise TrainingError(f"on held-out text, with random parameters, the model {leaks.leaks}.")
        untested = tuple(leaks.untested)
    model.train()
    set_learning_rate(optimiser, 0.0)  # so that it stays the model that was tried
    step = partial(_update, model, optimiser, run, placement)
    return Trial(untested=untested, step_seconds=threads.step_seconds(step, placement.device) if timed else {})


def training_step(model: LanguageModel, optimiser: Optimizer, run: RunSpec, placement: DevicePlacement) -> None:
    """Update a model once, on one micro-batch of random tokens; raises TrainingError where a number is not finite."""
    loss, norm = _gradients(model, optimiser, run, placement)
    if not math.isfinite(loss.item()):
        with placement.autocast():
            where = first_bad_module(model, *_inputs(run, placement))
        raise TrainingError(f"the loss of a first step is not finite; first bad: {where or 'not found again'}.")
    if not math.isfinite(norm.item()):
        raise TrainingError("the loss of a first step is finite, but its gradients are not; correct the backward pass.")
    optimiser.step()


def _update(model: LanguageModel, optimiser: Optimizer, run: RunSpec, placement: DevicePlacement) -> None:
    """Do the work of a step."""
    _gradients(model, optimiser, run, placement)
    optimiser.step()


def _gradients(
    model: LanguageModel, optimiser: Optimizer, run: RunSpec, placement: DevicePlacement
) -> tuple[Tensor, Tensor]:
    """Compute the clipped gradients of one micro-batch; return its loss and the norm before clipping."""
    optimiser.zero_grad(set_to_none=True)
    with placement.autocast():
        loss, weighted, _ = model(*_inputs(run, placement), auxiliary=True)
    (loss + weighted).backward()
    return loss.detach(), clip_gradients(model, run.train)


def _inputs(run: RunSpec, placement: DevicePlacement) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one micro-batch of random tokens, always the same."""
    shape = (run.train.forward_batch(placement.processes.world), run.length + 1)
    tokens = torch.randint(run.model.vocab, shape, generator=torch.Generator().manual_seed(0)).to(placement.device)
    return tokens[:, :-1], tokens[:, 1:]


def _memory_failure(
    failure: JobFailure, run: RunSpec, placement: DevicePlacement, log: Callable[[str], None]
) -> JobFailure | None:
    """Return the failure of a trial that lacks memory with what to do, None where training needs less: log that."""
    world, device = placement.processes.world, placement.device
    if run.train.mesh(world)[1] > 1:
        log(f"{run.architecture} trains without a trial step, as one process has no room for the whole model.")
        return None
    needed = f"{run.train.forward_batch(world)} sequences of {run.length} tokens {NO_ROOM} of {device}"
    held = held_elsewhere(device)
    advice = f": {held}" if held else "; lower train.micro_batch or set train.checkpointing=true."
    return replace(failure, message=needed + advice)
