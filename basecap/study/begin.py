"""The beginning of a study: refuse what cannot work, prepare the data, claim the directory, make the plan."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from basecap import environment
from basecap.analysis.losses import load
from basecap.data import PreparedData, bigram_loss, check_text, check_vocabulary
from basecap.errors import ConfigError
from basecap.records import StudyRecords
from basecap.study.config import StudyConfig, validate
from basecap.study.growth import grown
from basecap.study.plan import Plan, RunSpec, check_points, cost, plan_evaluations, plan_runs
from basecap.study.preparing import cache_of, data_of
from basecap.study.proof import refuse_unsound
from basecap.study.provenance import refuse_other, refuse_other_precision
from basecap.study.run import Execution
from basecap.study.sweep import chosen_rates


def check(study: StudyConfig, world: int = 1) -> list[RunSpec]:
    """Build every model of the study without memory and every evaluation; raises ConfigError.

    Args:
        study: the study.
        world: the processes among which batches must divide.

    Returns:
        The runs, with the vocabulary that the study asks for: that of the data may be smaller.
    """
    runs = plan_runs(study, study.data.vocab)
    evaluations = plan_evaluations(study)
    for run in runs:
        cost(run)
        run.train.forward_batch(world)
        for evaluation in evaluations:
            check_points(run, evaluation.config.at, f"evals: {evaluation.declaration.name}: at")
    return runs


def begin(execution: Execution, checked: Sequence[RunSpec], only: set[str], held: contextlib.ExitStack) -> Plan:
    """Prepare the data, make the directory this study's and keep other processes out for as long as `held` is open.

    A study that is refused leaves study.yaml as it was: an architecture cannot be taken out of it again.

    Args:
        execution: the study, its directory and the device.
        checked: what `check` returned.
        only: the architectures to run.
        held: holds the lock of the directory.
    """
    records, study, device = StudyRecords(execution.out), execution.study, torch.device(execution.device)
    records.refuse_foreign()
    records.refuse_loss()
    _whole(records, study)
    _refuse_damaged(records, study)
    refuse_unsound([run for run in checked if run.name in only], device)
    check_text(study.data, cache_of(study, records.path))
    held.enter_context(records.locked())
    prepared = data_of(study, records.path)  # may fail: the directory is not yet this study's
    if study.model.vocab is not None:
        check_vocabulary(study.model.vocab, prepared.tokenizer)
    _refuse_other_data(records, prepared)
    plan = plan_of(records, study, prepared, only)
    for evaluation in plan.evaluations:
        evaluation.check(prepared, study.data.seq_len)
    for run in plan.runs:
        refuse_other(records.run(run.name, run.seed, run.rate), run)
    refuse_other_precision(records, plan.study, plan.runs, device)
    records.create(plan.study.model_dump(mode="json"))
    _write_surroundings(records, plan, prepared, device)
    return plan


def plan_of(records: StudyRecords, study: StudyConfig, data: PreparedData, only: set[str]) -> Plan:
    """Return the plan of the selected runs as far as they are known; a sweep has the first seed of the directory's."""
    whole = _whole(records, study)
    runs = plan_runs(whole, data.tokenizer.vocab_size, chosen_rates(records))
    chosen = [run for run in runs if run.name in only and (run.sweep or run.seed in study.seeds_of(run.name))]
    return Plan(study=whole, runs=tuple(chosen), evaluations=tuple(plan_evaluations(whole)))


def _refuse_damaged(records: StudyRecords, study: StudyConfig) -> None:
    """Raise DataError when what earlier runs recorded cannot be read, which the report would say after training."""
    for run in records.runs():
        load(run, run.evals(), run.metrics(), (*study.data.train, *study.data.ood))


def _whole(records: StudyRecords, study: StudyConfig) -> StudyConfig:
    """Return what the directory holds with this study: an earlier one's seeds and architectures too."""
    if not records.begun:
        return study
    return grown(validate(records.study(), str(records.path / "study.yaml")), study, records.path)


def recorded_data(study: StudyConfig, out: Path) -> PreparedData:
    """Return the data that the study in `out` was run with; raises ConfigError when its text has changed."""
    data = data_of(study, out)
    _refuse_other_data(StudyRecords(out), data)
    return data


def _refuse_other_data(records: StudyRecords, data: PreparedData) -> None:
    held = records.environment().get("data")
    if held not in (None, data.manifest_hash):
        raise ConfigError(
            f"{records.path} was begun with other data (manifest {held}, now {data.manifest_hash}); restore the text, "
            "or run into another --out."
        )


def _write_surroundings(records: StudyRecords, plan: Plan, data: PreparedData, device: torch.device) -> None:
    held = records.environment()
    machine = (
        held if held and (records.runs() or records.runs(sweep=True)) else environment.describe(device)
    )  # numbers stay with their machine
    text = {"overlap": data.overlap_rows(), "text_note": data.remark}
    found = {**machine, "data": data.manifest_hash, "bigram_loss": bigram_loss(data, plan.study.data.seq_len), **text}
    if found != held:
        records.write_environment(found)
    records.write_declarations(evaluation.declaration for evaluation in plan.evaluations)
