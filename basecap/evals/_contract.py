"""The interface of evaluations: a class that measures a model and declares the unit and axes of its numbers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from basecap.data import Tokenizer
from basecap.data.config import Line
from basecap.data.workload import Workload
from basecap.errors import ConfigError
from basecap.evals._replays import ReplayedPasses
from basecap.models.language_model import LanguageModel
from basecap.options import configured
from basecap.records.documents import DocumentLosses
from basecap.records.evaluation_points import At
from basecap.records.maps import Maps
from basecap.records.measured import Better, Declaration, Measurement
from basecap.registry import Registry


class EvaluationConfig(BaseModel):
    """Base class of evaluation options: frozen, unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: At = Field("every", description="evaluation points to run at: every, end, or the nearest to a list of tokens")
    name: Line | None = Field(
        None,
        description="what records and reports call it, so that a study can have it several times (default: its "
        "registered name)",
    )


#: The data of an evaluation: `PreparedData` for text, `TaskData` for tasks.
W = TypeVar("W", bound=Workload)


@dataclass(frozen=True, kw_only=True)
class Context(Generic[W]):
    """Inputs of an evaluation besides the model: the data of the run, the device and the precision.

    A `SharedEvaluation` measures the part of process `rank` of `world`. `note` shows a text beside the progress until
    the next call, such as the progress of a long evaluation. `replays` makes passes of its model as CUDA graphs.
    """

    data: W
    device: torch.device
    autocast: Callable[[], AbstractContextManager]
    note: Callable[[str], None] = lambda text: None
    replays: ReplayedPasses | None = None
    rank: int = 0
    world: int = 1

    def share(self, count: int) -> range:
        """Return which of `count` items this process measures: a block, so that joined parts keep the order."""
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of an evaluation: numbers, and optionally losses of single documents and influence maps.

    `samples` are values of single examples from which `SharedEvaluation.join` computes the numbers; not recorded.
    """

    measurements: list[Measurement]
    documents: dict[str, DocumentLosses] = field(default_factory=dict)
    maps: tuple[Maps, ...] = ()
    samples: Mapping[tuple[str, Any], np.ndarray] = field(default_factory=dict)


class Decoding(NamedTuple):
    """What is in memory while a model writes text.

    Attributes:
        sequences: whose decoding states are held.
        length: tokens of the longest of them.
        read: tokens of prompts that are read at once.
    """

    sequences: int
    length: int
    read: int


class Evaluation(ABC, Generic[W]):
    """Base class of evaluations. Subclasses set `Config` and define `run`; the decorator sets `declaration`."""

    Config: ClassVar[type[EvaluationConfig]] = EvaluationConfig
    #: The kind of studies that it applies to: text, task, or both (None).
    needs: ClassVar[Literal["text", "task"] | None] = None
    #: What reduces `tokens_read`, for a message, such as "documents or length of copying".
    reduced_by: ClassVar[str] = ""
    declaration: Declaration

    def __init__(self, config: EvaluationConfig):
        self.config = config
        if config.name is not None:
            self.declaration = replace(self.declaration, name=config.name)

    def expects(self, data: W) -> Collection[tuple[str, str]]:
        """Return (subset, metric) pairs that a complete result has, to detect tasks that were added to a study."""
        return ()

    def tokens_read(self, data: W, length: int) -> int | None:
        """Return how many tokens models of `length` tokens read at one evaluation point; None if that is unknown.

        `basecap plan` and `basecap run` compare it with the tokens of training. It must not take long.
        """
        return self.most_tokens(length)

    def most_tokens(self, length: int) -> int | None:
        """Return `tokens_read`, or more, where it does not depend on data, for a plan before data is prepared."""
        return None

    def decoding(self, model: LanguageModel) -> Decoding | None:
        """Return what is in memory while `model`, which may have no memory itself, writes text; None if it does not."""
        return None

    def check_options(self) -> None:
        """Raise ConfigError for options that name what does not exist.

        Called when the evaluation is planned, run or added to a study, before anything else; it must take seconds.
        """

    def missing(self) -> Sequence[str]:
        """Return sentences on what is not installed, for `basecap plan`."""
        return ()

    def refuse_missing(self) -> None:
        """Raise ConfigError, DataError if something besides the run's data is missing, before data is prepared."""

    def check_tokens(self, tokenizer: Tokenizer | None, length: int) -> None:
        """Raise DataError if models of `length` tokens, or texts in the tokens of `tokenizer`, cannot be measured.

        Called before text is prepared; `tokenizer` is None where it is not known by then.
        """

    def check(self, data: W, length: int) -> None:
        """Raise DataError if `data` lacks something that models of `length` tokens are measured on.

        Called before training, so that an error here costs no training, unlike one in `run`.
        """

    @abstractmethod
    def run(self, model: LanguageModel, context: Context[W]) -> Outcome:
        """Measure `model`, which is on the context's device; called without gradients."""

    def trial(self, model: LanguageModel, context: Context[W]) -> None:
        """Compute one batch of the largest shape that `run` needs. Called before training, to find errors early.

        The default computes the losses of one sequence of the training length.
        """
        tokens = torch.zeros(1, model.config.max_length, dtype=torch.int64, device=context.device)
        with context.autocast():
            model.token_losses(tokens, tokens)


class SharedEvaluation(Evaluation[W]):
    """An evaluation that is split among processes: `run` measures the part given by the rank of `Context`."""

    def join(self, parts: Sequence[Outcome]) -> Outcome:
        """Combine the outcomes of all processes to that of a single process; by default, all numbers and maps."""
        return Outcome(
            measurements=[found for part in parts for found in part.measurements],
            maps=tuple(maps for part in parts for maps in part.maps),
        )


EVALUATIONS: Registry[type[Evaluation]] = Registry("evaluation", "basecap.evals", "evals")


def evaluation(
    name: str, *, unit: str, better: Better, axes: tuple[str, ...] = ()
) -> Callable[[type[Evaluation]], type[Evaluation]]:
    """Register the decorated class as an evaluation with its unit, direction and the axes of its numbers.

    Raises:
        ConfigError: the class is not an `Evaluation` with the parts of one, or `better` is another word.
    """

    def register(cls: type[Evaluation]) -> type[Evaluation]:
        fault = _fault(cls, better)
        if fault is not None:
            raise ConfigError(f"evaluation {name!r} {fault}.")
        cls.declaration = Declaration(name=name, unit=unit, better=better, axes=axes)
        EVALUATIONS.add(name, cls, cls)
        return cls

    return register


def _fault(cls: type[Evaluation], better: str) -> str | None:
    """Return what is wrong with a class that somebody registers, and what to do; None if nothing is."""
    if not (isinstance(cls, type) and issubclass(cls, Evaluation)):
        return "is not a subclass of basecap.evals.Evaluation; derive it from that class"
    if cls.__abstractmethods__:
        return f"has no method {min(cls.__abstractmethods__)}; define it"
    if not (isinstance(cls.Config, type) and issubclass(cls.Config, EvaluationConfig)):
        return "has a Config that is not a subclass of basecap.evals.EvaluationConfig; derive it from that class"
    if cls.needs not in (None, "text", "task"):
        return f"needs {cls.needs!r}; set it to 'text' or 'task', or leave it out for both"
    if better not in get_args(Better):
        return f"declares better = {better!r}; set it to 'lower', 'higher' or 'neither'"
    return None


def build_evaluation(entry: str | dict[str, Any]) -> Evaluation:
    """Build an evaluation from an entry of a study, a name or {name: options}; raises ConfigError for others."""
    named = {entry: None} if isinstance(entry, str) else entry
    name, options = next(iter(named.items()), ("", None))
    if len(named) != 1 or not isinstance(options, dict | None):
        raise ConfigError(f"evals: {entry!r} is not an evaluation; write NAME or NAME: {{option: value}}.")
    cls = EVALUATIONS.get(name)
    found = cls(configured(cls.Config, options or {}, f"evaluation {name!r}", entry=name))
    called = found.declaration.name
    if called != name and called in EVALUATIONS.names():
        raise ConfigError(f"evaluation {name!r} cannot be named {called!r} like another one; choose another name.")
    return found
