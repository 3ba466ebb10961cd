"""Evaluations of stored weights: what finished runs have not been measured by, without training again."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from basecap.errors import ConfigError
from basecap.evals import build_evaluation
from basecap.plan.checks import check_evaluations, check_options
from basecap.plan.runs import RunSpec, model_of, moved_points, plan_study
from basecap.plan.workloads import Material, material_of, vocabulary_of
from basecap.plugins import load_plugin
from basecap.records import RunInfo, RunRecords, StudyRecords
from basecap.records.branches import branch_of
from basecap.records.evaluation_points import At, includes
from basecap.run.evaluation_job import StoredPoint, is_measured, measured
from basecap.run.executors import EXECUTORS, Executor, Resources, device_here, devices_for
from basecap.run.imported_models import evaluate_imported
from basecap.run.jobs import Execution, Runtime, report_failure
from basecap.run.provenance import absent_plugins, plugin_entries, refuse_other
from basecap.run.sweep import chosen_rates
from basecap.study.config import StudyConfig, restrict, select
from basecap.study.merge import held_study, with_evaluations
from basecap.system.files import real_path
from basecap.system.progress import progress
from basecap.system.yaml_text import parse_yaml
from basecap.train.checkpoint import stored, truncated
from basecap.train.distributed import processes
from basecap.train.interruption import listening

#: How many labels or numbers of tokens a message lists.
LISTED = 8


def evaluate_stored(runs: Sequence[RunSpec], runtime: Runtime, executor: Executor, at: At = "every") -> int:
    """Evaluate finished runs where an evaluation has no numbers and weights are stored; log which points lack weights.

    Args:
        runs: of the study; those that have not finished are left alone.
        runtime: of this process; has the study's evaluations among others.
        executor: evaluates the points, in this process or in several side by side.
        at: the evaluation points to look at.

    Returns:
        How many evaluations failed; each is logged.
    """
    group = runtime.group
    points = group.run_on_leader(lambda: [point for run in runs for point in _unmeasured(run, runtime, at)])
    due = [point for point in points if point.weights is not None]
    failed, ran = 0, defaultdict[str, list[StoredPoint]](list)
    with progress("evaluations", total=len(due) * group.is_leader, unit="points") as advance:
        for point, failures in executor.evaluate(due, partial(advance, 0)):
            advance(1, note=point.run.label)
            for name, failure in failures.items() if group.is_leader else ():
                report_failure(f"{name} of {point.run.label} failed at step {point.step}", failure, runtime.log)
            failed += len(failures)
            for name in (name for name in point.evaluations if name not in failures):
                ran[name].append(point)
    if group.is_leader:
        _log_ran(ran, runtime)
        _log_missing([point for point in points if point.weights is None], runtime.log)
        _log_truncated(runs, runtime)
    return failed


def _log_ran(ran: Mapping[str, Sequence[StoredPoint]], runtime: Runtime) -> None:
    """Log for each evaluation where it ran, and which runs it found nothing to measure in."""
    for name, points in ran.items():
        empty = [point for point in points if name in runtime.run_records(point.run).unmeasured()]
        if count := len(points) - len(empty):
            points_of = f"{count} evaluation point{'' if count == 1 else 's'}"
            runtime.log(f"{name} ran on the weights of {points_of}; the report has its numbers.")
        if empty:
            labels = sorted({point.run.label for point in empty})
            runtime.log(f"{name} has no numbers for {_listed(labels)}: it does not apply to such models.")


def _log_missing(points: Sequence[StoredPoint], log: Callable[[str], None]) -> None:
    """Log for each evaluation at which points it has no numbers because their weights are not stored."""
    for name in dict.fromkeys(name for point in points for name in point.evaluations):
        lacking = [point for point in points if name in point.evaluations]
        labels = sorted({point.run.label for point in lacking})
        tokens = sorted({point.tokens for point in lacking})
        log(
            f"{name}: missing at {len(lacking)} evaluation points of {_listed(labels)} (tokens: {_listed(tokens)}), "
            "whose weights are not stored; new runs store more with train.keep."
        )


def _log_truncated(runs: Sequence[RunSpec], runtime: Runtime) -> None:
    """Log the weights of finished runs that were cut short, before somebody needs them."""
    for records in (records for run in runs if (records := runtime.run_records(run)).finished):
        for _, path in sorted(_stored(records).items()):
            for name in truncated(path):
                runtime.log(f"{path / name} is missing or cut short; restore it, or remove {path}: it is of no use.")


def _listed(items: Sequence[object]) -> str:
    shown = [str(item) for item in items[:LISTED]]
    return ", ".join(shown) + (f" and {len(items) - LISTED} more" if len(items) > LISTED else "")


def _unmeasured(run: RunSpec, runtime: Runtime, at: At) -> list[StoredPoint]:
    """Return the evaluation points of a run where an evaluation that is due has no numbers."""
    records, timetable = runtime.run_records(run), run.timetable
    info = records.info()
    if info is None or not info.finished:
        return []
    end = info.stopped or timetable.end
    every = [tokens for tokens in timetable.tokens if tokens <= end * timetable.step_tokens]
    points = _unmeasured_at([step for step in timetable.points if step <= end], every, run, runtime, at)
    for branch in timetable.branches:
        points += _unmeasured_at([branch.steps], every, run, runtime, at, branch.tokens)
    return points


def _unmeasured_at(
    steps: Sequence[int], every: Sequence[int], run: RunSpec, runtime: Runtime, at: At, branch: int | None = None
) -> list[StoredPoint]:
    """Return those of a run's `steps`, or of one of its branches, where an evaluation that is due has no numbers."""
    records = runtime.run_records(run) if branch is None else branch_of(runtime.run_records(run), branch)
    done = measured(records)
    empty, weights, workload = records.unmeasured(), _stored(records), runtime.workloads[run.task]
    points = []
    for step in steps:
        tokens = step * run.timetable.step_tokens

        def due(chosen: At, tokens: int = tokens) -> bool:
            return includes(chosen, tokens, every) or (branch is not None and chosen == "end")

        missing = tuple(
            evaluation.declaration.name
            for evaluation in runtime.evaluations
            if due(at)
            and due(evaluation.config.at)
            and not is_measured(evaluation, step, done, workload)
            and evaluation.declaration.name not in empty
        )
        if missing:
            found = weights.get(step)
            points.append(
                StoredPoint(run=run, step=step, tokens=tokens, weights=found, evaluations=missing, branch=branch)
            )
    return points


def _stored(records: RunRecords) -> dict[int, Path]:
    """Return the directories of the stored weights of a run by step, including its last checkpoints."""
    return {**stored(records.resume), **stored(records.weights)}


def evaluate_directory(
    path: Path,
    *,
    add: Sequence[str],
    at: At | None,
    only: Sequence[str],
    on: Resources,
    plugins: Sequence[Path],
    log: Callable[[str], None],
) -> int | None:
    """Evaluate the stored weights of a study or of a run, see `evaluate_stored`; return how many evaluations failed.

    Under `torchrun` all processes evaluate each point together, and only the leader returns a number.

    Args:
        path: DIR, DIR/runs/NAME-sSEED or DIR/imported/NAME.
        add: evaluations that the study gets, as a study file names them.
        at: the evaluation points to look at, all when None; evaluations that are added run there in later runs too.
        only: the architectures to evaluate; all when empty.
        on: what they run on.
        plugins: files that were loaded.
        log: takes sentences for the terminal.

    Raises:
        ConfigError: there is no study or run, another command changes it, its text has changed, it has no weights at
            any point that is asked for, or names and options that do not work.
        DataError: the data does not hold what is measured, or records that cannot be read.
        Interrupted: SIGINT, SIGTERM or SIGHUP; the numbers of finished evaluations are recorded.
    """
    info = RunRecords(path).info()
    alone, elsewhere = info is not None and not info.imported, info is not None and info.imported
    records = StudyRecords(path if info is None else RunRecords(path).study)
    before, held = records.study(), held_study(records)
    study = _with_added(held, add, at, records.path)
    names = _chosen(study, only, path, info)
    loaded = {path: load_plugin(path) for path in plugins}
    chosen, executor_of = device_here(on), EXECUTORS.get(on.executor)
    execution = Execution(study=study, out=records.path, device=str(chosen), plugins=loaded, on=on)
    with listening(), processes(chosen) as group, contextlib.ExitStack() as locks:
        devices = devices_for(chosen, on, group.world)
        material = material_of(study, records.path)
        group.run_on_leader(lambda: _lock(records, material, locks, log))
        workloads = material.workloads()
        vocabulary = vocabulary_of(workloads)
        if not (only or alone):
            names = _buildable(names, study, vocabulary, records, log if group.is_leader else lambda line: None)
        plan = plan_study(restrict(study, names), vocabulary, chosen_rates(records))
        check_evaluations(study, plan.evaluations, workloads)
        runtime = Runtime(
            records=records, device=chosen, workloads=workloads, evaluations=plan.evaluations, group=group, log=log
        )
        runs = [] if elsewhere else _finished(plan.runs, runtime, path if alone else None, at, add)
        for sentence in moved_points(runs, at or "every", "--at") if group.is_leader else ():
            log(sentence)
        group.run_on_leader(lambda: _add(study, before, runtime))
        with executor_of(execution, runtime, devices) as executor:
            failed = evaluate_stored(runs, runtime, executor, at or "every")
        if study.task is None and not (only or alone):
            failed += evaluate_imported(study, runtime, path if elsewhere else None)
        return failed if group.is_leader else None


def _with_added(held: StudyConfig, add: Sequence[str], at: At | None, where: Path) -> StudyConfig:
    """Return the study `held` in the directory `where` with the evaluations of --add, whose options are checked."""
    entries = [_entry(text, at, held) for text in add]
    study = with_evaluations(held, entries, where)
    check_options(map(build_evaluation, entries))
    return study


def _chosen(study: StudyConfig, only: Sequence[str], path: Path, info: RunInfo | None) -> set[str]:
    """Return the architectures in `only`, without the reference unless it is named; all when empty.

    Raises ConfigError for another one than that of `path`, if it is the directory of one model with an info.
    """
    if info is not None and only and (info.imported or {*only} != {info.series}):
        raise ConfigError(f"{path} is {info.name} alone; leave out --only, or give {RunRecords(path).study}.")
    return select(study, only) & {*only} if only else select(study, only)


def _buildable(
    names: Collection[str], study: StudyConfig, vocabulary: int, records: StudyRecords, log: Callable[[str], None]
) -> set[str]:
    """Return the architectures that can be built, and log those whose plugins are not given.

    An architecture that cannot be built for another reason stays, and planning its runs says why.
    """
    given = set(names)
    runs = [*records.runs(), *records.runs(sweep=True)]
    infos = [info for run in runs if (info := run.info()) is not None]
    for entry in study.architectures:
        try:
            model_of(study, entry, vocabulary)
        except ConfigError:
            own = [info for info in infos if info.series == entry.name]
            absent = sorted({name for info in own for name in absent_plugins(info.plugins)})
            if entry.name in given and absent:
                given.remove(entry.name)
                options = " ".join(f"--plugin {name}" for name in absent)
                log(f"{entry.name} is left out, as its plugin is not given; add {options}.")
    return given or set(names)


def _lock(records: StudyRecords, material: Material, locks: contextlib.ExitStack, log: Callable[[str], None]) -> None:
    """Work in the directory, and prepare its text where that is not done."""
    with records.locked(log):
        locks.enter_context(records.entered())
        material.workloads()


def _refuse_without_weights(runs: Sequence[RunSpec], runtime: Runtime, at: At | None, add: Sequence[str]) -> None:
    """Raise ConfigError if what is asked for, evaluations or points, is missing only where no weights are stored."""
    points = [point for run in runs for point in _unmeasured(run, runtime, at or "every")]
    missing = [] if at is None else [name for point in points for name in point.evaluations]
    asked = [added(text) for text in add] or missing
    for name in dict.fromkeys(asked):
        lacking = [point for point in points if name in point.evaluations]
        if lacking and all(point.weights is None for point in lacking):
            stores = ((run.timetable.step_tokens, _stored(runtime.run_records(run))) for run in runs)
            kept = sorted({step * size for size, steps in stores for step in steps})
            raise ConfigError(
                f"{name} cannot be measured after {_listed(sorted({point.tokens for point in lacking}))} tokens, as no "
                f"weights of that point are stored; give --at a number of tokens with weights: {_listed(kept)}."
            )


def _add(study: StudyConfig, before: dict[str, Any], runtime: Runtime) -> None:
    """Record what the study has gained; raises ConfigError when another command has changed it."""
    records = runtime.records
    with records.locked():
        if records.study() != before:
            raise ConfigError(f"another command changed the study in {records.path}; run the same command again.")
        records.create(study.model_dump(mode="json"))
        if entries := plugin_entries(study):
            records.write_environment({**records.environment(), **entries})
        records.write_declarations(evaluation.declaration for evaluation in runtime.evaluations)


def _finished(
    runs: Sequence[RunSpec], runtime: Runtime, path: Path | None, at: At | None, add: Sequence[str]
) -> list[RunSpec]:
    """Return the finished runs with stored weights, or the one in `path`.

    Raises ConfigError without any, or where no weights are stored at any point that is asked for.
    """
    found, finished = [], False
    for run in runs:
        records = runtime.run_records(run)
        if path is not None and real_path(records.path) != real_path(path):
            continue
        if not records.finished:
            continue
        finished = True
        if _stored(records):
            refuse_other(records, run)
            found.append(run)
    if not found:
        where = path or runtime.records.path
        if finished:
            raise ConfigError(f"{where} has no stored weights; remove its runs and train them again to evaluate more.")
        raise ConfigError(f"{where} has no finished run; finish one with `basecap run`.")
    _refuse_without_weights(found, runtime, at, add)
    return found


def added(text: str) -> str:
    """Return the name of the evaluation that --add gives, which it has in records; ConfigError."""
    name, options = _read(text)
    return build_evaluation({name: options} if options else name).declaration.name


def _entry(text: str, at: At | None, held: StudyConfig) -> dict[str, Any]:
    """Return the entry of a study file that --add gives, with the option `at` of --at, else its own, else end.

    An evaluation that the study `held` has keeps that of the study.
    """
    (name, options), named = _read(text), added(text)
    evaluations = map(build_evaluation, held.evals)
    its = next((own.config.at for own in evaluations if own.declaration.name == named), "end")
    chosen = at or options.get("at", its)
    return {name: options | {"at": chosen if isinstance(chosen, str) else list(chosen)}}


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Return the kind and the options of the evaluation that --add gives; ConfigError."""
    try:
        entry = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"--add {text!r} {error}; write the name of an evaluation.") from error
    named = {entry: None} if isinstance(entry, str) else entry
    name, options = next(iter(named.items())) if isinstance(named, dict) and len(named) == 1 else (None, None)
    if name is None or not isinstance(options, dict | None):
        raise ConfigError(f"--add {text!r} is not an evaluation; write NAME or 'NAME: {{option: value}}'.")
    return name, dict(options or {})
