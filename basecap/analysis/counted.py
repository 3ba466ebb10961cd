"""Which evaluation point of a run on a task counts, and what the run answered there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from basecap.analysis.runs import Run
from basecap.analysis.shares import Share
from basecap.records import Record

#: The evaluation that a study of tasks is about.
EVALUATION = "recall"
#: Metrics of its records: shares of queried values, and of examples all of whose values are right.
ACCURACY, CASES = "accuracy", "case_accuracy"
VALIDATION, VALIDATION_CASES = "validation_accuracy", "validation_case_accuracy"
REGION = "region_"


class Key(NamedTuple):
    """What a share is about; `cell` holds the (axis, value) pairs of the record."""

    train: str
    test: str
    metric: str
    cell: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A run at the evaluation point that counts.

    Attributes:
        architecture: name of the entry of the study.
        task: the task it was trained on.
        seed: of the run.
        finished: whether the run is at its end.
        label: what every row says of it.
        step, tokens: of the evaluation point.
        validation: accuracy on validation examples of its own task, mean over cells; None where it was not measured.
        shares: what it answered there.
    """

    architecture: str
    task: str
    seed: int
    finished: bool
    label: dict[str, Any]
    step: int
    tokens: int
    validation: float | None
    shares: dict[Key, Share]


def count(run: Run, checkpoint: str) -> Counted | None:
    """Return the run at the point that `checkpoint` names, "best" or "last"; None where it has no such point.

    The best point has the highest validation accuracy on the run's own task, as the mean over cells; of equal ones the
    earliest. Points at which fewer cells were measured than at others do not count.
    """
    points = by_step(run.evals)
    if not points:
        return None
    most = max(len(records) for records in points.values())
    whole = {step: records for step, records in points.items() if len(records) == most}
    accuracies = {step: validation_accuracy(records) for step, records in whole.items()}
    step = max(whole)
    if checkpoint == "best":
        known = {step: accuracy for step, accuracy in accuracies.items() if accuracy is not None}
        if not known:
            return None
        step = max(known, key=lambda one: (known[one], -one))
    task = run.info["task"]
    return Counted(
        architecture=run.info["architecture"],
        task=task,
        seed=run.info["seed"],
        finished=run.info["status"] == "finished",
        label=run.label,
        step=step,
        tokens=whole[step][0].tokens,
        validation=accuracies[step],
        shares=_shares(task, whole[step]),
    )


def by_step(records: Iterable[Record]) -> dict[int, list[Record]]:
    """Return the records of shares that were measured, by evaluation point."""
    points: dict[int, list[Record]] = {}
    for record in records:
        if record.eval == EVALUATION and record.n > 0 and isfinite(record.value):
            points.setdefault(record.step, []).append(record)
    return dict(sorted(points.items()))


def validation_accuracy(records: Sequence[Record]) -> float | None:
    """Return the accuracy on validation examples at one point, mean over cells; None where it was not measured."""
    found = [record.value for record in records if record.metric == VALIDATION]
    return float(np.mean(found)) if found else None


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


def cell_of(record: Record) -> tuple[tuple[str, float], ...]:
    """Return the place of a record in the grid of its task."""
    return tuple(record.axis.items())
