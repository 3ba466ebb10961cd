"""What an evaluation is: a class that measures a model and declares what its numbers mean."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from basecap.data.workload import Workload
from basecap.errors import ConfigError, describe_problem, nearest
from basecap.maps import Maps
from basecap.models.language_model import LanguageModel
from basecap.records import Declaration, DocumentLosses
from basecap.registry import Registry


def _at(value: Any) -> Any:
    """Return an option `at` in its final form; a ValueError, which pydantic reports, says what it should be."""
    tokens = value if isinstance(value, list | tuple) else [value]
    if value in ("every", "end"):
        return value
    if tokens and all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in tokens):
        return tuple(tokens)
    raise ValueError("should be every, end or a list of tokens, such as [1000000]")


#: The evaluation points at which an evaluation runs: every one, the end of a run, or those after so many tokens.
At = Annotated[Literal["every", "end"] | tuple[int, ...], BeforeValidator(_at)]


def includes(at: At, tokens: int, last: bool) -> bool:
    """Whether an evaluation runs at the evaluation point after `tokens` tokens, which may be a run's `last`."""
    return at == "every" or (last if at == "end" else tokens in at)


class EvaluationConfig(BaseModel):
    """Base of every evaluation's options: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: At = Field("every", description="evaluation points where it runs: every, end, or a list of tokens")


#: What an evaluation measures on: `PreparedData` for text, `TaskData` for a task.
W = TypeVar("W", bound=Workload)


@dataclass(frozen=True, kw_only=True)
class Context(Generic[W]):
    """What an evaluation may use besides the model: what the run trains on, the device and the run's precision.

    A `SharedEvaluation` measures the part of process `rank` among `world` processes. `note` takes words that are shown
    beside the progress until the next ones come: how far a long evaluation is.
    """

    data: W
    device: torch.device
    autocast: Callable[[], AbstractContextManager]
    note: Callable[[str], None] = lambda words: None
    rank: int = 0
    world: int = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number: what it is about, the number, how many items it averages, its standard error, its place."""

    subset: str
    metric: str
    value: float
    n: int
    stderr: float | None = None
    axis: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an evaluation found: numbers, and where it has them losses of single documents and what layers read."""

    measurements: list[Measurement]
    documents: dict[str, DocumentLosses] = field(default_factory=dict)
    maps: tuple[Maps, ...] = ()


class Evaluation(ABC, Generic[W]):
    """Subclasses set `Config` and `declaration` (through the decorator) and define `run`."""

    Config: ClassVar[type[EvaluationConfig]] = EvaluationConfig
    #: What studies it is of: those that train on text, on tasks, or either (None).
    needs: ClassVar[Literal["text", "task"] | None] = None
    declaration: ClassVar[Declaration]

    def __init__(self, config: EvaluationConfig):
        self.config = config

    def expects(self, data: W) -> Collection[tuple[str, str]]:
        """Return subsets and metrics without which it is not complete, such as those of tasks that a study gains."""
        return ()

    def check(self, data: W, length: int) -> None:
        """Raise DataError when `data` does not hold what is measured, for models of `length` tokens; nothing has run.

        What is raised here costs no training, unlike what `run` raises.
        """

    @abstractmethod
    def run(self, model: LanguageModel, context: Context[W]) -> Outcome:
        """Measure `model`, which is on the context's device; no gradients are recorded."""

    def trial(self, model: LanguageModel, context: Context[W]) -> None:
        """Compute one batch as `run` does, of the largest shape that it needs; what fails here costs no training.

        Without one of its own, an evaluation is tried by the losses of one sequence of the training length.
        """
        tokens = torch.zeros(1, model.config.max_length, dtype=torch.int64, device=context.device)
        with context.autocast():
            model.token_losses(tokens, tokens)


class SharedEvaluation(Evaluation[W]):
    """An evaluation that several processes share: `run` measures the part of one, which `Context` names."""

    @abstractmethod
    def join(self, parts: Sequence[Outcome]) -> Outcome:
        """Return what `run` would have found in one process, from what it found in each."""


EVALUATIONS: Registry[type[Evaluation]] = Registry("evaluation", "basecap.evals", "evals")


def evaluation(
    name: str, *, unit: str, better: Literal["lower", "higher", "neither"], axes: tuple[str, ...] = ()
) -> Callable[[type[Evaluation]], type[Evaluation]]:
    """Class decorator: register an evaluation with its unit, direction and the axes its numbers vary over."""

    def register(cls: type[Evaluation]) -> type[Evaluation]:
        cls.declaration = Declaration(name=name, unit=unit, better=better, axes=axes)
        EVALUATIONS.add(name, cls, cls)
        return cls

    return register


def build_evaluation(entry: str | dict[str, Any]) -> Evaluation:
    """Build an evaluation from a study's entry: a name, or {name: options}; raises ConfigError."""
    named = {entry: None} if isinstance(entry, str) else entry
    name, options = next(iter(named.items()), ("", None))
    if len(named) != 1 or not isinstance(options, dict | None):
        raise ConfigError(f"evals: {entry!r} is not one evaluation; write its name, or its name: {{option: value}}.")
    cls = EVALUATIONS.get(name)
    fields = cls.Config.model_fields
    for key in options or {}:
        if key not in fields:
            raise ConfigError(f"unknown option {key!r} of evaluation {name!r}: {nearest(key, fields)}")
    try:
        return cls(cls.Config(**(options or {})))
    except ValidationError as error:
        first = error.errors()[0]
        given = f"option {first['loc'][0]!r} of evaluation {name!r} cannot be {first['input']!r}"
        raise ConfigError(f"{given}: it {describe_problem(first)}.") from error
