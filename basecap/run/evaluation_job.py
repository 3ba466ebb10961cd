"""An evaluation job: a model is measured and the numbers are recorded, during training or from stored weights."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from basecap.data.workload import Workload
from basecap.errors import ConfigError, LostDirectory
from basecap.evals import Context, Evaluation, Outcome, SharedEvaluation
from basecap.models.language_model import LanguageModel
from basecap.plan.runs import RunSpec
from basecap.records import RunRecords
from basecap.records.branches import branch_of
from basecap.records.measured import Record
from basecap.run import threads
from basecap.run.jobs import JobFailure, Runtime, describe_failure
from basecap.train.checkpoint import load_stored
from basecap.train.distributed import Processes
from basecap.train.interruption import run_interruptible
from basecap.train.placement import DevicePlacement, resolve

#: The subsets and metrics that are recorded, by step and evaluation.
Measured = dict[tuple[int, str], set[tuple[str, str]]]


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """What is evaluated: a model on the context's device, after how many steps and tokens, and where that is recorded.

    All processes of `group` evaluate it together.
    """

    model: LanguageModel
    step: int
    tokens: int
    context: Context
    records: RunRecords
    group: Processes


def evaluate(evaluation: Evaluation, evaluated: EvaluatedModel) -> None:
    """Measure a model and record what was found; all processes share what can be shared, else the leading one works."""
    group, context = evaluated.group, evaluated.context
    context.note(f"evaluating {evaluation.declaration.name}")
    if isinstance(evaluation, SharedEvaluation) and group.world > 1:
        own = replace(context, rank=group.rank, world=group.world)
        parts = run_interruptible(group, lambda: _measure(evaluation, evaluated.model, own))
        group.run_on_leader(lambda: _record(evaluation, evaluation.join(parts), evaluated))
    else:

        def alone() -> None:
            _record(evaluation, _measure(evaluation, evaluated.model, context), evaluated)

        run_interruptible(group, alone if group.is_leader else lambda: None)


def _measure(evaluation: Evaluation, model: LanguageModel, context: Context) -> Outcome:
    with torch.no_grad():
        outcome = evaluation.run(model, context)
    if not isinstance(outcome, Outcome):
        raise ConfigError(
            f"evaluation {evaluation.declaration.name!r} returns a {type(outcome).__name__}; return an Outcome of "
            "basecap.evals."
        )
    return outcome


def _record(evaluation: Evaluation, outcome: Outcome, evaluated: EvaluatedModel) -> None:
    _refuse_misplaced(evaluation, outcome)
    name, records, step = evaluation.declaration.name, evaluated.records, evaluated.step
    if outcome.documents:
        records.append_documents(name, step, outcome.documents)
    for number, maps in enumerate(outcome.maps):
        records.write_maps(name if len(outcome.maps) == 1 else f"{name}-{number}", step, maps)
    records.append_evals(
        Record(step=step, tokens=evaluated.tokens, eval=name, **vars(found)) for found in outcome.measurements
    )
    if not outcome.measurements:
        records.add_unmeasured(name)


def _refuse_misplaced(evaluation: Evaluation, outcome: Outcome) -> None:
    """Raise ConfigError when a number lacks an axis that is declared, or two have the same place."""
    name, axes = evaluation.declaration.name, evaluation.declaration.axes
    places = set()
    for found in outcome.measurements:
        if not found.axis.keys() >= {*axes}:
            raise ConfigError(
                f"evaluation {name!r} declares the axes {list(axes)}, and {found.subset} {found.metric} has "
                f"{list(found.axis)}; give it every axis that is declared."
            )
        place = (found.subset, found.metric, *sorted(found.axis.items()))
        if place in places:
            raise ConfigError(f"evaluation {name!r} measures {', '.join(map(str, place))} twice; return one number.")
        places.add(place)


@dataclass(frozen=True, kw_only=True)
class StoredPoint:
    """An evaluation point of a finished run, and the names of the evaluations that have no numbers there.

    It crosses process boundaries. `branch` are the tokens of the branch that it is the end of, see
    `basecap.records.branches`.
    """

    run: RunSpec
    step: int
    tokens: int
    weights: Path | None
    evaluations: tuple[str, ...]
    branch: int | None = None


def evaluate_point(
    point: StoredPoint, runtime: Runtime, show: Callable[[str], None] = lambda words: None
) -> dict[str, JobFailure]:
    """Measure the stored weights of a point as training would have; return the evaluations that failed.

    Args:
        point: has stored weights. All processes of the runtime's group evaluate them together.
        runtime: has the evaluations of the point among others.
        show: takes what is being evaluated.
    """
    device, records, group = runtime.device, runtime.run_records(point.run), runtime.group
    if device.type == "cuda":
        torch.cuda.set_device(device)
    info = records.info()
    precision = (info and info.precision) or resolve(point.run.train.precision, device)
    placement = DevicePlacement(device=device, processes=group, bf16=precision == "bf16")
    if point.branch is not None:
        records = branch_of(records, point.branch)

    def note(words: str) -> None:
        show(f"{point.run.label}: {words}")

    context = Context(data=runtime.workloads[point.run.task], device=device, autocast=placement.autocast, note=note)
    failures = {}
    count = info.threads if info is not None and device.type == "cpu" else None
    with ExitStack() as held, threads.using(count):
        claim = runtime.records.claimed(runtime.run_records(point.run), wait=True)
        group.run_on_leader(lambda: held.enter_context(claim))
        names = group.run_on_leader(lambda: _still_due(point, records, runtime))
        for evaluation in (found for found in runtime.evaluations if found.declaration.name in names):
            try:
                model = _load(point, runtime)
                evaluated = EvaluatedModel(
                    model=model, step=point.step, tokens=point.tokens, context=context, records=records, group=group
                )
                evaluate(evaluation, evaluated)
            except LostDirectory:
                raise
            except Exception as error:  # a fault of one evaluation must not cost the others
                failures[evaluation.declaration.name] = describe_failure(error, device)
    return failures


def _still_due(point: StoredPoint, records: RunRecords, runtime: Runtime) -> list[str]:
    """Return the evaluations of a point without those that another command has done since."""
    done, empty, workload = measured(records), records.unmeasured(), runtime.workloads[point.run.task]
    evaluations = [found for found in runtime.evaluations if found.declaration.name in point.evaluations]
    return [
        found.declaration.name
        for found in evaluations
        if found.declaration.name not in empty and not is_measured(found, point.step, done, workload)
    ]


def measured(records: RunRecords) -> Measured:
    """Return what a run has numbers of."""
    done: Measured = defaultdict(set)
    for record in records.evals():
        done[record.step, record.eval].add((record.subset, record.metric))
    return done


def is_measured(evaluation: Evaluation, step: int, done: Measured, workload: Workload) -> bool:
    """Whether an evaluation has all its numbers of a step in `done`; tasks may have been added since it ran."""
    found = done.get((step, evaluation.declaration.name))
    return found is not None and found >= {*evaluation.expects(workload)}


def _load(point: StoredPoint, runtime: Runtime) -> LanguageModel:
    """Return the model of a point; raises in all processes what fails in one of them."""
    assert point.weights is not None
    weights, loaded = point.weights, []
    runtime.group.run_on_all(lambda: loaded.append(load_stored(weights).to(runtime.device)))
    return loaded[0]
