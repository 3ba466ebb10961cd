"""What the analysis relies on in study.yaml and the records of a run, which people may have edited."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from basecap.errors import DataError, describe_problem


class _Entry(BaseModel):
    name: str


class _Data(BaseModel):
    train: list[str]
    ood: list[str]


class GapSection(BaseModel):
    """What studies of earlier versions lack is read as the default."""

    share: float = Field(0.5, alias="from")
    cost: float = 0.1


class _PublishedFigure(BaseModel):
    source: str
    values: dict[str, list[Any]]


class _Figure(BaseModel):
    kind: Literal["losses", "entropy", "scores"]
    columns: list[str] = []
    published: _PublishedFigure | None = None


class StudyFile(BaseModel):
    """The keys of study.yaml that are read; others may stand beside them."""

    name: str
    reference: str
    architectures: list[_Entry]
    data: _Data
    seeds: list[int]
    gap: GapSection
    figure: _Figure | None = None


class _Task(BaseModel):
    train: list[str] = Field(min_length=1)
    test: list[str] | None = None
    checkpoint: str = "best"


class _PublishedValue(BaseModel):
    architecture: str
    train: str | None = None
    test: str | None = None
    length: float | None = None
    pairs: float | None = None
    value: float


class _Published(BaseModel):
    source: str
    metric: Literal["accuracy", "case_accuracy"]
    values: list[_PublishedValue]


class TaskStudyFile(BaseModel):
    """The keys of the study.yaml of a study of tasks that are read, likewise."""

    name: str
    architectures: list[_Entry]
    task: _Task
    published: _Published | None = None


class _Machine(BaseModel):
    device: str | None = None
    precision: str | None = None


class Provenance(_Machine):
    """The keys of run.json that a run goes on by, likewise."""

    before: list[_Machine] | None = None
    plugins: dict[str, str] | None = None


class RunFile(Provenance):
    """The keys of run.json that are read, likewise."""

    name: str
    seed: int
    use: str
    status: str
    message: str
    parameters: int | None = None


class TaskRunFile(BaseModel):
    """What the run.json of a study of tasks says besides."""

    architecture: str
    task: str


class Metrics(BaseModel):
    """The keys of a row of metrics.jsonl that are read, likewise."""

    step: int
    tokens: int
    train_loss: float
    tokens_per_s: float
    seconds: float


def complete(content: dict[str, Any], kind: type[BaseModel], path: Path | str) -> dict[str, Any]:
    """Return `content`; raises DataError that names the file at `path` when a key is missing or of another type."""
    try:
        kind.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise DataError(
            f"{path} is damaged at {where!r} ({describe_problem(problem)}); restore or remove it."
        ) from error
    return content
