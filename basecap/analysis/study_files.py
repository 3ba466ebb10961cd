"""The parts of study.yaml and of a run's records that the analysis reads, checked: people may have edited them.

The reading is lenient: records of earlier versions lack some keys and have others, and only what is used is checked.
`RunInfo` of `basecap.records` does the same for run.json.
"""

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from basecap.options import damaged
from basecap.records import RunRecords


class _File(BaseModel):
    """A part of a file; most kinds of files are not read, so their checks are made when one is."""

    model_config = ConfigDict(defer_build=True)


class _Entry(_File):
    name: str
    control: bool = False


class _Data(_File):
    train: list[str]
    ood: list[str]


class GapSection(_File):
    """The settings of the gap; studies of earlier versions may lack them."""

    share: float = Field(0.5, alias="from")
    cost: float = 0.1


class PublishedFigure(_File):
    """Published values by architecture: points [x, y], or a number per column."""

    source: str
    values: dict[str, list[Any]]


class Figure(_File):
    """The figure of a paper that a study reproduces."""

    kind: Literal["losses", "entropy", "scores"]
    columns: list[str] = []
    measured: list[str | None] = []
    x: list[float] | None = None
    y: list[float] | None = None
    published: PublishedFigure | None = None


class TextStudyFile(_File):
    """The keys that are read in the study.yaml of a study of text; it may have others."""

    name: str
    reference: str
    architectures: list[_Entry]
    data: _Data
    seeds: list[int]
    reference_seeds: list[int] | None = None
    gap: GapSection
    figure: Figure | None = None
    scale: str | None = None
    summary: str = ""


class _Task(_File):
    train: list[str] = Field(min_length=1)
    test: list[str] | None = None
    shifts: dict[str, list[str]] = {}
    checkpoint: str = "best"


class PublishedValue(_File):
    """A published number, in percent, of a cell or of the mean over cells; None for a cross."""

    architecture: str
    train: str | None = None
    test: str | None = None
    length: float | None = None
    pairs: float | None = None
    value: float | None


class PublishedNumbers(_File):
    """Published numbers of a study of tasks."""

    source: str
    metric: Literal["accuracy", "case_accuracy"]
    values: list[PublishedValue]


class _TaskEntry(_Entry):
    tasks: list[str] | None = None


class TaskStudyFile(_File):
    """The keys that are read in the study.yaml of a study of tasks."""

    name: str
    architectures: list[_TaskEntry]
    task: _Task
    published: PublishedNumbers | None = None
    reference: str | None = None
    scale: str | None = None
    summary: str = ""


class EnvironmentFile(_File):
    """The keys that are read in environment.json of any study.

    Architectures in `allowed_unproved` have a verdict even where their leak test is not complete.
    """

    failed_checks: dict[str, str] = {}
    allowed_unproved: list[str] = []
    plugins: dict[str, dict[str, str]] = {}


class Metrics(_File):
    """The keys that are read in a row of metrics.jsonl."""

    step: int
    tokens: int
    train_loss: float
    tokens_per_s: float
    seconds: float


_METRICS = TypeAdapter(list[Metrics], config=ConfigDict(defer_build=True))
File = TypeVar("File", bound=BaseModel)


def parse(content: dict[str, Any], kind: type[File], path: Path) -> File:
    """Return `content` as a `kind`; raises DataError naming the file at `path` when a key is missing or mistyped."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise damaged(path, error) from error


def read_metrics(run: RunRecords) -> list[Metrics]:
    """Return the rows of metrics.jsonl; raises DataError naming the line where a key is wrong, as `parse`."""
    try:
        return _METRICS.validate_python(run.metrics())
    except ValidationError as error:
        raise damaged(run.path / "metrics.jsonl", error, rows=True) from error
