"""Sets up a study: refuses what cannot work, prepares the data, locks the directory, makes the plan."""

import contextlib
from collections.abc import Sequence

import torch

from basecap.analysis.text.losses import load
from basecap.analysis.training_log import TrainingLog
from basecap.errors import ConfigError
from basecap.evals import Evaluation
from basecap.evals.recall import Recall
from basecap.plan.runs import Plan, RunSpec, costs, plan_evaluations, plan_runs
from basecap.plan.workloads import Material, Tasks, material_of, vocabulary_of
from basecap.records import StudyRecords
from basecap.run.jobs import Execution, check_evaluations, faults_of
from basecap.run.provenance import (
    continue_to_more_tokens,
    held_study,
    plugin_entries,
    refuse_other,
    refuse_other_precision,
)
from basecap.run.sweep import chosen_rates
from basecap.run.trial import refuse_leaks
from basecap.study.config import StudyConfig, restrict
from basecap.study.merge import merge_studies
from basecap.system import environment


def check(study: StudyConfig, world: int = 1) -> list[RunSpec]:
    """Build every model of the study without memory and every evaluation; raises ConfigError.

    It plans what this command names, before text is prepared, which may take hours. `plan_of` cannot take these runs
    over: their vocabulary may shrink to that of the text, and the directory may hold more seeds and learning rates.

    Args:
        study: the study.
        world: the processes among which batches must divide.

    Returns:
        The runs, with the vocabulary that the study asks for: that of the data may be smaller.
    """
    runs = plan_runs(study, study.vocabulary)
    evaluations = plan_evaluations(study)
    costs(runs)
    for run in runs:
        run.train.forward_batch(world)
        if run.train.stop_at is not None and not any(_stops(evaluation) for evaluation in evaluations):
            raise ConfigError("train.stop_at needs the evaluation recall at every evaluation point; add it to evals.")
    if study.task is not None:  # tasks need no preparation
        check_evaluations(study, evaluations, Tasks(study.task).workloads())
    return runs


def _stops(evaluation: Evaluation) -> bool:
    return isinstance(evaluation, Recall) and evaluation.config.at == "every"


def start_study(execution: Execution, checked: Sequence[RunSpec], only: set[str], held: contextlib.ExitStack) -> Plan:
    """Prepare the data, write study.yaml, and lock the directory until `held` is closed.

    A study that is refused leaves study.yaml as it was: an architecture cannot be taken out of it again.

    Args:
        execution: the study, its directory and the device.
        checked: what `check` returned.
        only: the architectures to run.
        held: holds the lock of the directory.
    """
    records, study, device = StudyRecords(execution.out), execution.study, torch.device(execution.device)
    records.refuse_foreign()
    records.refuse_lost_results()
    _refuse_others(records, {run.name for run in checked})
    whole = _merged_study(records, study)
    _refuse_damaged(records, study)
    material = material_of(whole, records.path)
    refuse_leaks([run for run in checked if run.architecture in only], device)
    material.refuse_missing()
    for evaluation in plan_evaluations(whole):
        with faults_of(evaluation):
            evaluation.refuse_missing()
    held.enter_context(records.locked())
    workloads = material.workloads()  # may fail: the directory is not yet this study's
    plan = plan_of(records, study, vocabulary_of(workloads), only)
    check_evaluations(whole, plan.evaluations, workloads)
    earlier = held_study(records).train if records.has_study else study.train
    for run in plan.runs:
        own = records.run(run.name, run.seed, run.rate)
        continue_to_more_tokens(own, run, earlier)
        refuse_other(own, run)
    refuse_other_precision(records, plan.study, plan.runs, device)
    records.create(plan.study.model_dump(mode="json"))
    _write_environment(records, plan, material, device)
    return plan


def plan_of(records: StudyRecords, study: StudyConfig, vocabulary: int, only: set[str]) -> Plan:
    """Return the plan of the selected runs as far as they are known; a sweep has the first seed of the directory's."""
    whole = _merged_study(records, study)
    # Other architectures of the directory may be from plugin files that are not loaded now.
    runs = plan_runs(restrict(whole, only), vocabulary, chosen_rates(records))
    chosen = [run for run in runs if run.sweep or run.seed in study.seeds_of(run.architecture)]
    return Plan(study=whole, runs=tuple(chosen), evaluations=tuple(plan_evaluations(whole)))


def _refuse_others(records: StudyRecords, names: set[str]) -> None:
    """Raise ConfigError when runs that were copied to a new directory are not all of its study."""
    others = [] if records.has_study else [run.path for run in records.runs() if run.info().get("name") not in names]
    if others:
        raise ConfigError(f"{others[0]} is no run of this study; copy only runs that it has, such as the reference's.")


def _refuse_damaged(records: StudyRecords, study: StudyConfig) -> None:
    """Raise DataError when records of earlier runs are damaged: before training, not when the report is written."""
    for run in records.runs():
        evals, log = run.evals(), TrainingLog.read(run)
        if study.data is not None:
            load(run, evals, log, (*study.data.train, *study.data.ood))


def _merged_study(records: StudyRecords, study: StudyConfig) -> StudyConfig:
    """Return what the directory holds with this study: an earlier one's seeds and architectures too."""
    if not records.has_study:
        return study
    return merge_studies(held_study(records), study, records.path)


def _write_environment(records: StudyRecords, plan: Plan, material: Material, device: torch.device) -> None:
    held = records.environment()
    machine = (
        held if held and (records.runs() or records.runs(sweep=True)) else environment.describe(device)
    )  # numbers stay with their machine
    found = {**machine, **material.environment_entries(), **plugin_entries(plan.study)}
    if found != held:
        records.write_environment(found)
    records.write_declarations(evaluation.declaration for evaluation in plan.evaluations)
