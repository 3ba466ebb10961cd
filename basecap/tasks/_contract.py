"""The interface of tasks: examples as a function of (seed, index), a solver that sees the input only, and cells.

A file in this package (or a user's plugin file) defines one `Task` and registers it with `@task(name, ...)`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from basecap.errors import ConfigError
from basecap.options import configured
from basecap.plugins import faults
from basecap.registry import Registry
from basecap.tasks._draws import ExampleDraws, Ints, key_of
from basecap.tasks._instances import NOTHING, Canvas, Instances

#: Tokens generated at a time, few enough for a processor's cache.
_CHUNK = 2**16
#: Maximum size of a chunk's table with one row per example and one column per token of the vocabulary.
_TABLE = 2**23

T = TypeVar("T", bound="Task")

Answers = dict[int, frozenset[int]]
#: Where a model answers, see `Task.readout`.
Readout = Literal["each", "last"]
Cell = dict[str, int | float]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What there is to know in a task that asks for facts which its examples do not explain.

    `pairs` of its examples number the people from 0; scored targets are facts, the other ones parts of names.

    Attributes:
        people: how many there are, each with a name of its own.
        name_bits: log2 of the number of possible names.
        fact_bits: log2 of the number of possible facts about a person.
    """

    people: int
    name_bits: float
    fact_bits: float


class TaskConfig(BaseModel):
    """Base class of task options: frozen, unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    mode: Literal["clean", "paper"] = Field(
        "clean", description="clean: exactly one right answer per query; paper: as in the authors' code"
    )
    length: int = Field(64, ge=2, le=2**20, description="tokens of an example")


class Task(ABC):
    """A family of synthetic tasks. Subclasses set `Config` and define `vocabulary`, `make`, `solve` and `grid`."""

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    #: The options that differ between the cells of the grid; accuracy is reported per cell.
    axes: ClassVar[tuple[str, ...]] = ("length", "pairs")
    #: Where answers are read: "each": every position predicts its own target; "last": all targets are decoded from the
    #: activations at the last position, by a decoder that the models of the study get.
    readout: ClassVar[Readout] = "each"
    #: Increase this with every change of the examples, so that their identity changes too.
    revision: ClassVar[int] = 1

    def __init__(self, config: TaskConfig):
        """Take the options; raises ConfigError if they are inconsistent."""
        self.config: Any = config  # an instance of the subclass's Config
        self.check()

    @classmethod
    def options_of(cls, name: str) -> dict[str, Any] | None:
        """Return the options of an unregistered name such as "mqar-k3v5", None if it does not belong to this family."""
        return None

    def check(self) -> None:  # noqa: B027 - optional to override
        """Raise ConfigError if the options are inconsistent, such as more pairs than fit into the length."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids, including those of targets."""

    @property
    def length(self) -> int:
        """Number of positions T of an input."""
        return self.config.length

    @property
    def cell(self) -> Cell:
        """The cell of this task: the value of every axis."""
        return {axis: getattr(self.config, axis) for axis in self.axes}

    @property
    def facts(self) -> Facts | None:
        """What a model has to keep in its parameters, for `knowledge`; None where the input has all that is needed."""
        return None

    @property
    def identity(self) -> str:
        """SHA-256 of family, revision and all options: equal identities and seeds mean equal examples."""
        content = {"family": type(self).__name__, "revision": self.revision, "options": self.config.model_dump()}
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @abstractmethod
    def grid(self) -> tuple[Cell, ...]:
        """Return the published cells."""

    def at(self, cell: Mapping[str, Any]) -> Self:
        """Return the same task in another cell; raises ConfigError if the cell does not fit."""
        family, options = type(self), {**self.config.model_dump(), **cell}
        return family(configured(family.Config, options, f"task {family.__name__}"))

    def instances(self, seed: int, indices: Iterable[int]) -> Instances:
        """Return the examples with the given indices, a pure function of (seed, index).

        Args:
            seed: at least 0; each seed has different examples.
            indices: indices of N examples, at least 0, in any order.
        """
        numbers = np.fromiter(indices, dtype=np.int64)
        if seed < 0 or numbers.min(initial=0) < 0:
            raise ConfigError("seed and indices of examples must be 0 or more.")
        key = key_of(seed, self.identity)
        made = Instances.empty(len(numbers), self.length, self.choice_shape())
        step = max(1, min(_CHUNK // self.length, _TABLE // self.vocabulary))
        for start in range(0, len(numbers), step):
            part = slice(start, start + step)
            self.make(ExampleDraws(key, numbers[part]), Canvas(made.rows(part)))
        return made

    def choice_shape(self) -> tuple[int, int] | None:
        """Return the number of groups and regions of an example, None if every group has one right answer."""
        return None

    @abstractmethod
    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`: all of canvas.inputs, and roles, pairs, targets and groups."""

    @abstractmethod
    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the right answers at the scored positions, computed from the input only.

        Args:
            inputs: the tokens of one example, int64 [T].
            asked: the scored positions, int64, increasing.

        Returns:
            The set of right tokens of each position.
        """


def asked(instances: Instances, row: int) -> Ints:
    """Return the scored positions of an example."""
    return np.nonzero(instances.groups[row] != NOTHING)[0]


@dataclass(frozen=True, kw_only=True)
class NamedTask:
    """A registered name: a family and the options that differ from its defaults."""

    name: str
    family: type[Task]
    options: Mapping[str, Any] = field(default_factory=dict)
    summary: str
    source: str


TASKS: Registry[NamedTask] = Registry("task", "basecap.tasks", "tasks")


def task(
    name: str, *, source: str, summary: str, variants: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None
) -> Callable[[type[Task]], type[Task]]:
    """Register the decorated class as a task with variants.

    Args:
        name: name of the task with its default options.
        source: paper or repository that defines it.
        summary: one line for `basecap list tasks`.
        variants: further names, each with a summary and the options that differ.
    """

    def register(cls: type[Task]) -> type[Task]:
        if not (isinstance(cls, type) and issubclass(cls, Task)):
            raise ConfigError(f"task {name!r} is not a subclass of basecap.tasks.Task; derive it from that class.")
        plain: dict[str, tuple[str, Mapping[str, Any]]] = {name: (summary, {})}
        for key, (line, options) in {**plain, **(variants or {})}.items():
            TASKS.add(key, NamedTask(name=key, family=cls, options=options, summary=line, source=source), cls)
        return cls

    return register


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build the task called `name`, overriding `options`; raises ConfigError for unknown names and options."""
    family, own = _registered(name)
    config = configured(family.Config, {**own, **(options or {})}, f"task {name!r}")
    with faults(f"task {name!r} cannot be built"):
        task = family(config)
        _ = task.vocabulary, task.length, task.cell  # may be properties of a plugin
    return task


def _registered(name: str) -> tuple[type[Task], Mapping[str, Any]]:
    """Return the family of a name and the options that the name stands for."""
    known = dict(TASKS.items())
    if name not in known:
        for family in dict.fromkeys(entry.family for entry in known.values()):
            if (own := family.options_of(name)) is not None:
                return family, own
    entry = TASKS.get(name)
    return entry.family, entry.options
