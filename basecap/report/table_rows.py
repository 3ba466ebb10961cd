"""Rows of the page's tables: one per architecture, its seeds folded into it."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import mean, median
from typing import Any

from basecap.analysis.results import EvaluationResults, RunRow, StudyResults, TaskResults, TextResults
from basecap.analysis.rows import Estimate, Row, grouped


@dataclass(frozen=True, kw_only=True)
class ArchitectureRow:
    """The runs of an architecture: how many are in which state, their largest tokens, median speed, time together.

    `evaluating` is the mean share of their time that evaluation points took, `state_bytes` the size of the decoding
    state of one sequence; None where unknown.
    """

    name: str
    state: str
    parameters: int | None
    state_bytes: int | None
    tokens: int
    tokens_per_s: float | None
    seconds: float | None
    evaluating: float | None
    machines: list[str]
    passes: float | None
    runs: list[RunRow]


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """What a number of runs were measured on by an evaluation, as its records describe it."""

    evaluation: str
    subset: str
    data: str
    runs: int


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The most pairs that are recalled at a length, 0 for none, and the most that were tested."""

    pairs: int
    most: int


@dataclass(frozen=True, kw_only=True)
class CapacityRow:
    """What the runs of an architecture on a task recall there, by length in tokens.

    `state` is the size in bytes of the decoding state of the longest training sequence, None where unknown.
    """

    architecture: str
    train: str
    state: int | None
    places: dict[int, Capacity]


@dataclass(frozen=True, kw_only=True)
class FinalRun:
    """A run at its last evaluation point: training loss, held-out loss, then the loss on each domain, None without."""

    name: str
    seed: int
    tokens: int
    losses: list[float | None]


@dataclass(frozen=True, kw_only=True)
class FinalRow:
    """The last evaluation points of an architecture's runs, and the mean losses; None for a run without one."""

    name: str
    tokens: int
    means: list[float | None]
    runs: list[FinalRun]


def at_lowest(row: Row) -> Estimate | None:
    """Return the gap at the lowest loss that an architecture and the reference have both seen, with its interval."""
    along = row.along
    if along is None:
        return None
    low, high = (None if ends is None else ends[0] for ends in (along.low, along.high))
    return Estimate(value=along.value[0], low=low, high=high)


def by_architecture(study: StudyResults) -> list[ArchitectureRow]:
    """Return a row per architecture: the costs of its runs together, and the runs themselves."""
    rows = []
    for name, runs in grouped(study.runs, attrgetter("name")).items():
        rates = [run.tokens_per_s for run in runs if run.tokens_per_s is not None]
        seconds = [run.seconds for run in runs if run.seconds is not None]
        evaluating = [run.evaluating for run in runs if run.evaluating is not None]
        states = [run.status for run in runs]
        rows.append(
            ArchitectureRow(
                name=name,
                state=", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
                parameters=next((run.parameters for run in runs if run.parameters is not None), None),
                state_bytes=next((run.state_bytes for run in runs if run.state_bytes is not None), None),
                tokens=max(run.tokens for run in runs),
                tokens_per_s=median(rates) if rates else None,
                seconds=sum(seconds) if seconds else None,
                evaluating=mean(evaluating) if evaluating else None,
                machines=list(dict.fromkeys(machine for run in runs for machine in run.machines)),
                passes=max((run.passes for run in runs if run.passes is not None), default=None),
                runs=runs,
            )
        )
    return rows


def capacities(study: TaskResults) -> list[CapacityRow]:
    """Return how many pairs the runs of each architecture and training task recall at each length of that task."""
    rows = []
    for found in study.tests:
        cells = [cell for cell in found.cells if {"length", "pairs"} <= cell.axis.keys()]
        if found.test != found.train or not cells:
            continue
        own = (found.architecture, found.train)
        names = {point.name for point in study.points if (point.architecture, point.train) == own}
        states = [run.state_bytes for run in study.runs if run.name in names and run.state_bytes is not None]
        places: dict[int, Capacity] = {}
        for length in sorted({int(cell.axis["length"]) for cell in cells}):
            tested = {cell.axis["pairs"]: cell.accuracy.value for cell in cells if cell.axis["length"] == length}
            recalled = [pairs for pairs, accuracy in tested.items() if accuracy >= study.learned]
            places[length] = Capacity(pairs=int(max(recalled, default=0)), most=int(max(tested)))
        state = states[0] if states else None
        rows.append(CapacityRow(architecture=found.architecture, train=found.train, state=state, places=places))
    return rows


def final_losses(study: TextResults) -> list[FinalRow]:
    """Return the last evaluation point of each run, and the means over the runs of an architecture."""
    domains = [*study.train_domains, *study.ood_domains]
    last = {(point.name, point.seed): point for point in study.points}
    runs = [
        FinalRun(
            name=point.name,
            seed=point.seed,
            tokens=point.tokens,
            losses=[point.training, point.held_out, *(point.loss_on(domain) for domain in domains)],
        )
        for point in last.values()
    ]
    return [
        FinalRow(
            name=name,
            tokens=max(run.tokens for run in own),
            means=[_mean(column) for column in zip(*(run.losses for run in own), strict=True)],
            runs=own,
        )
        for name, own in grouped(runs, attrgetter("name")).items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def numbers_of(found: EvaluationResults) -> list[dict[str, Any]]:
    """Return what an evaluation measured for a terminal: a row for each architecture and subset, a column a metric.

    The numbers are means over the runs of an architecture; None where one of them is not finite.
    """
    rows = []
    for key, own in grouped(found.rows, lambda row: (row.name, row.subset, *map(row.axis.get, found.axes))).items():
        row = {"architecture": key[0], "runs": len({one.seed for one in own}), "subset": key[1]}
        row |= dict(zip(found.axes, key[2:], strict=True))
        for metric, numbers in grouped(own, attrgetter("metric")).items():
            row[f"{metric} ({found.kind_of(metric)[0]})"] = _mean([one.value for one in numbers])
        rows.append(row)
    return rows


def without_null(content: Any) -> Any:
    """Return settings without those that are not set."""
    if isinstance(content, dict):
        return {key: without_null(value) for key, value in content.items() if value is not None}
    return [without_null(value) for value in content] if isinstance(content, list) else content


def measured_on(study: StudyResults) -> list[DataRow]:
    """Return what evaluations were measured on where records describe it; several rows where runs differ."""
    runs: dict[tuple[str, str, str], set[tuple[str, int]]] = {}
    for found in study.evaluations:
        for row in found.rows:
            if row.data is not None:
                runs.setdefault((found.name, row.subset, row.data), set()).add((row.name, row.seed))
    return [
        DataRow(evaluation=evaluation, subset=subset, data=data, runs=len(own))
        for (evaluation, subset, data), own in runs.items()
    ]
