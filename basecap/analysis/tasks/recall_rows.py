"""The rows of the tables of a study of tasks, as results.json holds them; accuracies are shares."""

from dataclasses import dataclass
from typing import Literal

from basecap.analysis.rows import Interval

Verdict = Literal["holds", "loses", "undecided", "untrained"]


@dataclass(frozen=True, kw_only=True)
class CellRow:
    """One cell of a task's grid: its place, accuracies, and how many test examples it has."""

    axis: dict[str, float]
    accuracy: Interval
    case_accuracy: Interval | None
    examples: int


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """What the runs of an architecture that were trained on one task answer on one task.

    Attributes:
        architecture, train, test: names.
        seeds: the runs that count.
        accuracy: share of queried values that are right, mean over cells.
        case_accuracy: share of examples all of whose values are right, likewise.
        regions: share of queried values answered with the value of each region, likewise; empty without regions.
        cells: each cell that all of these runs were tested in.
    """

    architecture: str
    train: str
    test: str
    seeds: list[int]
    accuracy: Interval
    case_accuracy: Interval | None
    regions: tuple[Interval, ...]
    cells: tuple[CellRow, ...]


@dataclass(frozen=True, kw_only=True)
class TrainedRow:
    """Whether the runs of an architecture recall on the pattern they were trained on.

    `own` is over the cells that it was trained in: on test examples, of "all" cells that are tested or of "some"; on
    "validation" examples where none of them is tested; None where neither was measured.
    """

    architecture: str
    train: str
    seeds: list[int]
    own: Interval | None
    measured: Literal["all", "some", "validation"]
    recalls: bool


@dataclass(frozen=True, kw_only=True)
class ShiftRow:
    """A shortcut index: accuracy where it was trained minus accuracy on another task, over the cells that both have.

    The verdict is "untrained" where it does not recall on its own pattern, so that the index says little.
    """

    architecture: str
    train: str
    test: str
    seeds: list[int]
    cells: int
    index: Interval
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class ShortcutRow:
    """The mean of an architecture's shortcut indices over training tasks and shifts; a seed is one unit.

    Training tasks count on which it recalls; all, with `recalls` false, where there is none.
    """

    architecture: str
    seeds: list[int]
    shifts: int
    index: Interval
    recalls: bool
