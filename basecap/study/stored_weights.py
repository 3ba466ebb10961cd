"""Evaluation jobs on stored weights: what finished runs have not been measured by, without training again."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from basecap import environment
from basecap.errors import ConfigError
from basecap.evals import At, Context, Evaluation, EvaluationConfig, includes
from basecap.files import parse_yaml
from basecap.progress import progress
from basecap.records import RunRecords, StudyRecords
from basecap.study.config import select, validate
from basecap.study.evaluation_job import Checkpoint, evaluate
from basecap.study.merge import with_evaluations
from basecap.study.plan import RunSpec, check_points, plan_evaluations, plan_runs
from basecap.study.provenance import refuse_other
from basecap.study.sweep import chosen_rates
from basecap.study.training_job import Runtime, failure_words, report_failure
from basecap.study.workloads import material_of, vocabulary_of
from basecap.train.checkpoint import load_stored, stored
from basecap.train.distributed import Processes
from basecap.train.loop import DevicePlacement, resolve


@dataclass(frozen=True, kw_only=True)
class Point:
    """An evaluation point of a finished run, and the evaluations that have no numbers there."""

    run: RunSpec
    step: int
    tokens: int
    weights: Path | None
    evaluations: list[Evaluation]


def evaluate_stored(runs: Sequence[RunSpec], runtime: Runtime, at: At = "every") -> int:
    """Evaluate finished runs where an evaluation has no numbers and weights are stored; say which points lack weights.

    Args:
        runs: of the study; those that have not finished are left alone.
        runtime: the study's evaluations among others.
        at: the evaluation points to look at.

    Returns:
        How many evaluations failed; each is said.
    """
    points = [point for run in runs for point in _unmeasured(run, runtime, at)]
    due = [point for point in points if point.weights is not None]
    failed = 0
    with progress("evaluations", total=len(due), unit="points") as advance:
        for point in due:
            failed += _evaluate_point(point, runtime, partial(advance, 0))
            advance(1, note=point.run.label)
    lacking = [point for point in points if point.weights is None]
    counts = Counter(found.declaration.name for point in lacking for found in point.evaluations)
    for name, count in counts.items():
        of = {point.run.label for point in lacking if name in {found.declaration.name for found in point.evaluations}}
        runtime.log(
            f"{name}: missing at {count} evaluation points of {_listed(sorted(of))}, whose weights are not stored "
            "(train.keep)."
        )
    return failed


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels) if len(labels) <= 3 else f"{labels[0]} and {len(labels) - 1} other runs"


def _unmeasured(run: RunSpec, runtime: Runtime, at: At) -> list[Point]:
    """Return the evaluation points of a run where an evaluation that is due has no numbers."""
    records = runtime.run_records(run)
    if records.info().get("status") != "finished":
        return []
    done: dict[tuple[int, str], set[tuple[str, str]]] = defaultdict(set)
    for record in records.evals():
        done[record.step, record.eval].add((record.subset, record.metric))
    empty, weights = records.unmeasured(), _stored(records)
    timetable, points = run.timetable, []
    end = records.info().get("stopped", timetable.steps)
    workload = runtime.workloads[run.task]
    for step in [step for step in timetable.points if step <= end]:
        tokens, last = step * timetable.step_tokens, step == end
        missing = [
            evaluation
            for evaluation in runtime.evaluations
            if includes(at, tokens, last)
            and includes(evaluation.config.at, tokens, last)
            and not _is_measured(done.get((step, evaluation.declaration.name)), evaluation.expects(workload))
            and evaluation.declaration.name not in empty
        ]
        if missing:
            points.append(Point(run=run, step=step, tokens=tokens, weights=weights.get(step), evaluations=missing))
    return points


def _is_measured(found: set[tuple[str, str]] | None, expected: Collection[tuple[str, str]]) -> bool:
    """Whether an evaluation has all numbers that are expected; tasks may have been added since it ran."""
    return found is not None and found >= {*expected}


def _stored(records: RunRecords) -> dict[int, Path]:
    """Return where the weights of a run stand, by step; those of its last checkpoints too."""
    return {**stored(records.checkpoints), **stored(records.weights)}


def _evaluate_point(point: Point, runtime: Runtime, show: Callable[[str], None]) -> int:
    """Measure the weights of one point as training would have; return how many evaluations failed."""
    device, records = runtime.device, runtime.run_records(point.run)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    precision = records.info().get("precision") or resolve(point.run.train.precision, device)
    placement = DevicePlacement(device=device, processes=Processes(), bf16=precision == "bf16")

    def note(words: str) -> None:
        show(f"{point.run.label}: {words}")

    context = Context(data=runtime.workloads[point.run.task], device=device, autocast=placement.autocast, note=note)
    failed = 0
    for evaluation in point.evaluations:
        try:
            assert point.weights is not None
            model = load_stored(point.weights).to(device)
            checkpoint = Checkpoint(
                model=model,
                step=point.step,
                tokens=point.tokens,
                context=context,
                records=records,
                group=placement.processes,
            )
            evaluate(evaluation, checkpoint)
        except Exception as error:  # a fault of one evaluation must not cost the others
            message, trace = failure_words(error)
            what = f"{evaluation.declaration.name} of {point.run.label} failed at step {point.step}"
            report_failure(what, message, trace, runtime.log)
            failed += 1
    return failed


def evaluate_directory(
    place: Path,
    *,
    add: Sequence[str],
    at: str | None,
    only: Sequence[str],
    device: str | None,
    log: Callable[[str], None],
) -> int:
    """Evaluate what stands in the directory of a study or of a run, see `evaluate_stored`; return how many failed.

    Args:
        place: DIR, or DIR/runs/NAME-sSEED.
        add: evaluations that the study gets, as a study file names them.
        at: the evaluation points to look at, as in a study file; those that are added run there in later runs too.
        only: the architectures to evaluate; all when empty.
        device: where; the best there is when not given.
        log: takes sentences for the terminal.

    Raises:
        ConfigError: no study or run is there, another process runs it, its text has changed, it has no weights, or
            names and options that do not work.
        DataError: the data does not hold what is measured, or records that cannot be read.
    """
    alone = bool(RunRecords(place).info())
    records = StudyRecords(place.parent.parent if alone else place)
    held = validate(records.study(), str(records.path / "study.yaml"))
    when = _parse_at(at)
    study = with_evaluations(held, [_entry(text, when) for text in add], records.path)
    evaluations = plan_evaluations(study)
    workloads, chosen = material_of(study, records.path).workloads(), environment.choose_device(device)
    for evaluation in evaluations:
        for workload in workloads.values():
            evaluation.check(workload, study.length)
    names = select(study, only) if not only else select(study, only) & {*only}  # without the reference unless named
    planned = plan_runs(study, vocabulary_of(workloads), chosen_rates(records))
    runs = [run for run in planned if run.architecture in names]
    runtime = Runtime(
        records=records, device=chosen, workloads=workloads, evaluations=evaluations, group=Processes(), log=log
    )
    with records.locked():
        runs = _finished(runs, runtime, place if alone else None)
        for run in runs:
            check_points(run, when or "every", "--at")
        records.create(study.model_dump(mode="json"))
        records.write_declarations(evaluation.declaration for evaluation in evaluations)
        return evaluate_stored(runs, runtime, when or "every")


def _finished(runs: Sequence[RunSpec], runtime: Runtime, place: Path | None) -> list[RunSpec]:
    """Return the finished runs with stored weights, or the one in `place`; raises ConfigError without any."""
    found, finished = [], False
    for run in runs:
        records = runtime.run_records(run)
        if place is not None and records.path.name != place.name:
            continue
        if records.info().get("status") != "finished":
            continue
        finished = True
        if _stored(records):
            refuse_other(records, run)
            found.append(run)
    if not found:
        where = place or runtime.records.path
        if finished:
            raise ConfigError(f"{where} has no stored weights; remove its runs and train them again to evaluate more.")
        raise ConfigError(f"{where} has no finished run; finish one with `basecap run`.")
    return found


def _entry(text: str, at: At | None) -> str | dict[str, Any]:
    """Return the entry of a study file that --add gives, with the option `at` of --at."""
    try:
        entry = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"--add {text!r} {error}; write the name of an evaluation.") from error
    named = {entry: {}} if isinstance(entry, str) else entry
    if not isinstance(named, dict) or len(named) != 1:
        raise ConfigError(f"--add {text!r} is not an evaluation; write NAME or 'NAME: {{option: value}}'.")
    ((name, options),) = named.items()
    options = {**(options or {}), **({} if at is None else {"at": at if isinstance(at, str) else list(at)})}
    return {name: options} if options else name


def _parse_at(text: str | None) -> At | None:
    if text is None:
        return None
    try:
        return EvaluationConfig(at=parse_yaml(text)).at
    except ValueError as error:
        raise ConfigError(f"--at {text!r} should be every, end or a number of tokens.") from error
