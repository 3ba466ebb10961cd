"""Which evaluation point of a run on a task counts, and how much it answered right there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from basecap.analysis.rows import grouped
from basecap.analysis.runs import Run
from basecap.analysis.tasks.shares import Share
from basecap.errors import DataError
from basecap.records.measured import Record

#: The evaluation that a study of tasks is about.
EVALUATION = "recall"
#: Metrics of its records: shares of queried values, and of examples all of whose values are right.
ACCURACY, CASES = "accuracy", "case_accuracy"
VALIDATION, VALIDATION_CASES = "validation_accuracy", "validation_case_accuracy"
REGION = "region_"


#: The (axis, value) pairs of a record: its place in the grid of its task.
Cell = tuple[tuple[str, float], ...]


class Key(NamedTuple):
    """What a share is about."""

    train: str
    test: str
    metric: str
    cell: Cell


@dataclass(frozen=True, kw_only=True)
class TaskRun:
    """A run at the evaluation point that counts.

    Attributes:
        name: of the run.
        architecture: name of the entry of the study.
        task: the task it was trained on.
        seed: of the run.
        finished: whether the run is at its end.
        step, tokens: of the evaluation point.
        validation: accuracy on validation examples of its own task, mean over cells; None where it was not measured.
        passed_over: whether a better point does not count, as less was measured there.
        shares: of right answers there.
    """

    name: str
    architecture: str
    task: str
    seed: int
    finished: bool
    step: int
    tokens: int
    validation: float | None
    passed_over: bool
    shares: dict[Key, Share]


def select_point(run: Run, checkpoint: str) -> TaskRun | None:
    """Return the run at the point that `checkpoint` names, "best" or "last"; None where it has no such point.

    The best point has the highest validation accuracy on the run's own task, as the mean over cells; of equal ones the
    earliest. Points at which fewer cells were measured than at others do not count: a test task may be new.
    """
    points = by_step(run.evals)
    if not points:
        return None
    most = max(len(records) for records in points.values())
    whole = [step for step, records in points.items() if len(records) == most]
    accuracies = _validation_accuracies(points)
    step, passed_over = whole[-1], False
    if checkpoint == "best":
        known = [one for one in whole if one in accuracies]
        if not known:
            return None
        step = max(known, key=lambda one: (accuracies[one], -one))
        passed_over = accuracies[step] < max(accuracies.values())
    info, task = run.info, run.info.task
    if info.architecture is None or task is None:
        key = "task" if info.architecture else "architecture"
        raise DataError(f"{run.records.path / 'run.json'} is damaged at {key!r} (is missing); restore or remove it.")
    return TaskRun(
        name=info.name,
        architecture=info.architecture,
        task=task,
        seed=info.seed,
        finished=info.finished,
        step=step,
        tokens=points[step][0].tokens,
        validation=accuracies.get(step),
        passed_over=passed_over,
        shares=_shares(task, points[step]),
    )


def by_step(records: Iterable[Record]) -> dict[int, list[Record]]:
    """Return the records of shares that were measured, by evaluation point."""
    shares = (record for record in records if record.eval == EVALUATION and record.n > 0 and isfinite(record.value))
    return dict(sorted(grouped(shares, attrgetter("step")).items()))


def validation_accuracy(records: Sequence[Record]) -> float | None:
    """Return the accuracy on validation examples at one point, mean over cells; None where it was not measured."""
    found = [record.value for record in records if record.metric == VALIDATION]
    return float(np.mean(found)) if found else None


def _validation_accuracies(points: dict[int, list[Record]]) -> dict[int, float]:
    """Return the accuracy on validation examples of each point that has it for as many cells as any other."""
    counts = {step: sum(record.metric == VALIDATION for record in records) for step, records in points.items()}
    found = {step: validation_accuracy(points[step]) for step, count in counts.items() if count == max(counts.values())}
    return {step: accuracy for step, accuracy in found.items() if accuracy is not None}


def _shares(task: str, records: Sequence[Record]) -> dict[Key, Share]:
    """Return the shares of one point: each is of as many independent parts as there are examples."""
    examples = {
        (record.metric == VALIDATION_CASES, record.subset, cell_of(record)): record.n
        for record in records
        if record.metric in (CASES, VALIDATION_CASES)
    }
    shares = {}
    for record in records:
        validating = record.metric in (VALIDATION, VALIDATION_CASES)
        independent = examples.get((validating, record.subset, cell_of(record)), record.n)
        key = Key(task, record.subset, record.metric, cell_of(record))
        shares[key] = Share(record.value, independent)
    return shares


def cell_of(record: Record) -> Cell:
    """Return the place of a record in the grid of its task."""
    return tuple(record.axis.items())
