"""What the analysis relies on in study.yaml and run.json, which people may have edited."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from basecap.errors import DataError


class _Entry(BaseModel):
    name: str


class _Data(BaseModel):
    train: list[str]
    ood: list[str]


class _Train(BaseModel):
    seeds: list[int]


class _Gap(BaseModel):
    tolerance: float


class StudyFile(BaseModel):
    """The keys of study.yaml that are read; others may stand beside them."""

    name: str
    reference: str
    architectures: list[_Entry]
    data: _Data
    train: _Train
    gap: _Gap


class _Machine(BaseModel):
    device: str | None = None
    precision: str | None = None


class RunFile(_Machine):
    """The keys of run.json that are read, likewise."""

    name: str
    seed: int
    use: str
    status: str
    message: str
    before: list[_Machine] | None = None


def complete(content: dict[str, Any], kind: type[BaseModel], path: Path) -> dict[str, Any]:
    """Return `content`; raises DataError that names the file at `path` when a key is missing or of another type."""
    try:
        kind.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise DataError(f"{path} is damaged at {where!r} ({problem['msg']}); restore or remove it.") from error
    return content
