"""Starts a study: refuses what cannot work, prepares the data, makes the plan; one command at a time does so."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from basecap.analysis.text.losses import load
from basecap.analysis.training_log import TrainingLog
from basecap.errors import ConfigError
from basecap.evals import Evaluation
from basecap.plan.checks import check_evaluations, faults_of
from basecap.plan.runs import Plan, RunSpec, plan_evaluations, plan_runs
from basecap.plan.workloads import Material, material_of, vocabulary_of
from basecap.records import StudyRecords
from basecap.run.executors import is_remote, prepare_by_jobs
from basecap.run.jobs import Execution, Runtime
from basecap.run.proofs import refuse_leaks
from basecap.run.provenance import continue_to_more_tokens, plugin_entries, refuse_other, refuse_other_precision
from basecap.run.sweep import chosen_rates
from basecap.study.config import StudyConfig, restrict
from basecap.study.merge import held_study, merge_studies
from basecap.system import environment
from basecap.train.config import TrainSection
from basecap.train.distributed import Processes


@dataclass(frozen=True, kw_only=True)
class Started:
    """A study that has started: made once by a command, and passed on.

    Attributes:
        asked: the study of this command.
        only: the architectures to run.
        plan: what the directory holds, and what is to be finished.
        execution: what all jobs share, in this process and in others.
        runtime: what jobs use in this process: the opened data, evaluations, device and records.
    """

    asked: StudyConfig
    only: set[str]
    plan: Plan
    execution: Execution
    runtime: Runtime

    def after_sweep(self) -> Plan:
        """Return the plan again: sweeps have chosen learning rates since it was made."""
        vocabulary = vocabulary_of(self.runtime.workloads)
        runs = selected_runs(self.runtime.records, self.plan.study, self.asked, vocabulary, self.only)
        return replace(self.plan, runs=runs)


def start_study(
    execution: Execution,
    checked: Plan,
    only: set[str],
    group: Processes,
    log: Callable[[str], None],
    held: contextlib.ExitStack,
) -> Started:
    """Prepare the data, write study.yaml, and work in the directory until `held` is closed.

    A study that is refused leaves study.yaml as it was: an architecture cannot be taken out of it again.

    Args:
        execution: the study of this command, its directory and the device.
        checked: what `check` returned for it.
        only: the architectures to run.
        group: the processes that start it together; the leading one writes.
        log: takes sentences for the terminal.
        held: says to other commands that this one works in the directory.
    """
    records, device = StudyRecords(execution.out), torch.device(execution.device)
    plan: Plan | None = None
    while plan is None:
        accepted = group.run_on_leader(lambda: _accept(records, checked, only, device))
        execution = replace(execution, study=accepted.whole)
        plan = group.run_on_leader(partial(_prepare, execution, checked.study, only, accepted, log, held, records))
    runtime = Runtime(
        records=records,
        device=device,
        workloads=accepted.material.workloads(),
        evaluations=plan.evaluations,
        group=group,
        log=log,
        profile=execution.profile,
    )
    return Started(asked=checked.study, only=only, plan=plan, execution=execution, runtime=runtime)


@dataclass(frozen=True, kw_only=True)
class _Accepted:
    """What the directory holds with the study of this command, what it trains on, its study.yaml before, and proofs."""

    whole: StudyConfig
    material: Material
    before: dict[str, Any] | None
    proofs: dict[str, Any]


def _accept(records: StudyRecords, checked: Plan, only: set[str], device: torch.device) -> _Accepted:
    """Return what the directory would hold; writes nothing."""
    records.refuse_foreign()
    records.refuse_lost_results()
    _refuse_others(records, {run.name for run in checked.runs})
    before = _content(records)
    whole = checked.study if before is None else merge_studies(held_study(records), checked.study, records.path)
    _refuse_damaged(records, checked.study)
    asked = [run for run in checked.runs if run.architecture in only]
    proofs = refuse_leaks(asked, device, records.environment().get("proofs"))
    return _Accepted(whole=whole, material=material_of(whole, records.path), before=before, proofs=proofs)


def _prepare(
    execution: Execution,
    asked: StudyConfig,
    only: set[str],
    accepted: _Accepted,
    log: Callable[[str], None],
    held: contextlib.ExitStack,
    records: StudyRecords,
) -> Plan | None:
    """Set the study up; return its plan, None where another command has changed the directory since `accepted`."""
    whole, device = accepted.whole, torch.device(execution.device)
    material, evaluations = accepted.material, plan_evaluations(whole)
    _refuse_missing(material, evaluations)
    prepare_by_jobs(execution, log)
    material.workloads()  # commands on several machines prepare the text together, then one sets the study up
    with records.locked(log):
        if _content(records) != accepted.before:
            return None
        held.enter_context(records.entered())
        workloads = material.workloads()  # may fail: the directory is not yet this study's
        runs = selected_runs(records, whole, asked, vocabulary_of(workloads), only)
        check_evaluations(whole, evaluations, workloads)
        earlier = held_study(records).train if records.has_study else asked.train
        for run in runs:
            _refuse_other(records, run, earlier)
        if not is_remote(execution.on.executor):  # else its jobs look at their own device
            refuse_other_precision(records, whole, runs, device)
        plan = Plan(study=whole, runs=runs, evaluations=tuple(evaluations))
        records.create(whole.model_dump(mode="json"))
        _write_environment(records, plan, material, device, accepted.proofs)
    if note := records.environment().get("text_note"):
        log(f"{note}.")
    return plan


def _refuse_other(records: StudyRecords, run: RunSpec, earlier: TrainSection) -> None:
    """Raise ConfigError when what is recorded is another run, unless it is continued to more tokens."""
    own = records.run(run.name, run.seed, run.rate)
    info = own.info()
    if info is not None and info.hash not in (None, run.hash):
        with records.claimed(own) as mine:
            if not mine:
                raise ConfigError(f"another command trains {own.path} with other settings; wait until it has ended.")
            continue_to_more_tokens(own, run, earlier)
    refuse_other(own, run)


def _refuse_missing(material: Material, evaluations: Sequence[Evaluation]) -> None:
    """Raise ConfigError, DataError when text, or what an evaluation needs, is missing: before anything is prepared."""
    material.refuse_missing()
    for evaluation in evaluations:
        with faults_of(evaluation):
            evaluation.refuse_missing()


def selected_runs(
    records: StudyRecords, whole: StudyConfig, asked: StudyConfig, vocabulary: int, only: set[str]
) -> tuple[RunSpec, ...]:
    """Return the selected runs as far as they are known; a sweep has the first seed of the directory's.

    Args:
        records: of the study; they have the learning rates that sweeps have chosen.
        whole: what its directory holds.
        asked: the study of this command, whose seeds are run.
        vocabulary: number of token ids of the data.
        only: the architectures to run; others may be from plugin files that are not loaded now.
    """
    runs = plan_runs(restrict(whole, only), vocabulary, chosen_rates(records))
    return tuple(run for run in runs if run.sweep or run.seed in asked.seeds_of(run.architecture))


def _refuse_others(records: StudyRecords, names: set[str]) -> None:
    """Raise ConfigError when runs that were copied to a new directory are not all of its study."""
    runs = [] if records.has_study else records.runs()
    others = [run.path for run in runs if (info := run.info()) is not None and info.name not in names]
    if others:
        raise ConfigError(f"{others[0]} is no run of this study; copy only runs that it has, such as the reference's.")


def _refuse_damaged(records: StudyRecords, study: StudyConfig) -> None:
    """Raise DataError when records of earlier runs are damaged: before training, not when the report is written."""
    for run in records.runs():
        if (info := run.info()) is not None:
            records.refuse_misplaced(run, info)
        evals, log = run.evals(), TrainingLog.read(run)
        if study.data is not None:
            load(run, evals, log, (*study.data.train, *study.data.ood))


def _content(records: StudyRecords) -> dict[str, Any] | None:
    """Return study.yaml as it is, None where there is none."""
    return records.study() if records.has_study else None


def _write_environment(
    records: StudyRecords, plan: Plan, material: Material, device: torch.device, proofs: dict[str, Any]
) -> None:
    held = records.environment()
    machine = (
        held if held and (records.runs() or records.runs(sweep=True)) else environment.describe(device)
    )  # numbers stay with their machine
    found = {**machine, **material.environment_entries(), **plugin_entries(plan.study)}
    if proofs:
        found["proofs"] = {**held.get("proofs", {}), **proofs}
    if found != held:
        records.write_environment(found)
    records.write_declarations(evaluation.declaration for evaluation in plan.evaluations)
