"""The section `task` of a study: tasks, cells and number of examples."""

import functools
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from basecap.data.config import Count, Line
from basecap.errors import ConfigError, nearest
from basecap.plugins import faults
from basecap.tasks import Cell, Readout, Task, build_task


def _number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError("should be a number")


#: An int is not converted to a float, because tasks refuse 64.0 as a length.
CellValue = Annotated[Any, BeforeValidator(_number)]


class TaskSection(BaseModel):
    """The tasks that the runs of a study train on and are tested on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    train: tuple[Line, ...] = Field(
        min_length=1, description="tasks to train on (`basecap list tasks`): one run per architecture, task and seed"
    )
    test: tuple[Line, ...] = Field((), description="tasks that runs are tested on (default: those of task.train)")
    cross: bool = Field(
        True, description="whether every run is tested on all tasks of task.test; false: on its own training task alone"
    )
    shifts: dict[str, tuple[Line, ...]] = Field(
        default_factory=dict,
        description="for each training task, the test tasks that its shortcut index compares with (default: all); "
        "ignored for tasks that --scale, --set or a study that extends this one leaves out",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="options such as mode and vocab, for every task that has them; under the name of a task, those of "
        "that task alone, as in {vocab: 32, mqar-k2v2: {vocab: 6}}",
    )
    cells: tuple[dict[str, CellValue], ...] | None = Field(
        None,
        min_length=1,
        description="combinations of length, pairs and other options; each has its own examples. A cell that does not "
        "fit a task is left out for that task (default: the published grid of each task)",
    )
    test_cells: tuple[dict[str, CellValue], ...] | None = Field(
        None, min_length=1, description="cells of the tests (default: those of task.cells)"
    )
    examples: Count = Field(20_000, ge=1, le=2**40, description="training examples per cell and epoch")
    held_out: Count = Field(
        100, ge=1, le=2**30, description="validation examples per cell, and as many test examples per cell"
    )
    seed: Count = Field(42, ge=0, lt=2**62, description="seed of all examples and their order, the same for all runs")
    checkpoint: Literal["best", "last"] = Field(
        "best",
        description="evaluation point to report: best (highest validation accuracy on the run's own task) or last",
    )

    @field_validator("train", "test")
    @classmethod
    def _names_differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a task is named twice; remove one")
        return value

    @model_validator(mode="after")
    def _tasks_fit(self) -> "TaskSection":
        self.refuse_two_readouts()
        if missing := [name for name in self.train if not self.cross and name not in self.tested]:
            raise ConfigError(f"task.cross is false and task.test lacks {missing[0]!r}; add it there.")
        for name in {*self.shifts, *(name for names in self.shifts.values() for name in names)}:
            build_task(name)  # refuses an unknown one
        known = {key for name in self._names for key in _fields(name)}
        for key, value in self.options.items():
            if isinstance(value, dict):
                _refuse_unknown(value, _fields(key), f"task {key!r}")
            else:
                _refuse_unknown([key], known, "the tasks")
        for cells in (self.cells, self.test_cells):
            self._refuse_impossible(cells or ())
        self._refuse_replaced()
        self.every()
        return self

    @property
    def tested(self) -> tuple[str, ...]:
        """The names of all tasks that runs are tested on."""
        return self.test or self.train

    def tested_by(self, name: str) -> tuple[str, ...]:
        """Return the names of the tasks that runs trained on `name` are tested on."""
        return self.tested if self.cross else (name,)

    def training(self, name: str) -> tuple[Task, ...]:
        """Return the task `name` in each of its training cells; raises ConfigError without any."""
        return self._in_cells(name, self.cells)

    def tests(self, name: str) -> tuple[Task, ...]:
        """Return the task `name` in each of its test cells; raises ConfigError without any."""
        return self._in_cells(name, self.test_cells or self.cells)

    @property
    def vocabulary(self) -> int:
        """Number of token ids of all tasks together."""
        return max(task.vocabulary for task in self.every())

    @property
    def readout(self) -> Readout:
        """Where the tasks are answered, the same for all of them."""
        return build_task(self.train[0]).readout

    @property
    def length(self) -> int:
        """Tokens of the longest training or test example."""
        return max(task.length for task in self.every())

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.train, *self.tested)))

    def every(self) -> list[Task]:
        """Return all tasks of the study in all their cells."""
        trained = [task for name in self.train for task in self.training(name)]
        return trained + [task for name in self.tested for task in self.tests(name)]

    def _in_cells(self, name: str, cells: tuple[Cell, ...] | None) -> tuple[Task, ...]:
        found: list[Task] = []
        reason = "its grid is empty."
        options = self._options_of(name)
        with faults(f"task {name!r} cannot list its cells"):
            tried = build_task(name, options).grid() if cells is None else cells
        for cell in tried:
            try:
                task = build_task(name, {**options, **cell})
            except ConfigError as error:
                reason = str(error)
                continue
            if task.cell in [other.cell for other in found]:
                raise ConfigError(f"task {name!r} has the cell {_text(task.cell)} twice; remove one of them.")
            found.append(task)
        foreign = [set(cell) - _fields(name) for cell in cells or ()]
        if not found and foreign and all(foreign):
            lacks, own = min(foreign[0]), ", ".join(f"{key}: {value}" for key, value in build_task(name).cell.items())
            raise ConfigError(
                f"every cell of this study has an option that task {name!r} lacks, such as {lacks!r}; set task.cells "
                f"to cells that fit it, such as [{{{own}}}], or to null for its published grid."
            )
        if not found:
            raise ConfigError(f"no cell fits task {name!r}: {reason}")
        return tuple(found)

    def refuse_two_readouts(self) -> None:
        """Raise ConfigError for tasks that one model cannot answer, as only some of them need a decoder."""
        for name in self._names:
            if build_task(name).readout != self.readout:
                decoded, other = (name, self.train[0]) if self.readout == "each" else (self.train[0], name)
                raise ConfigError(
                    f"task {decoded!r} is decoded from the last position, but {other!r} is answered at each position, "
                    "and no model does both; give each of them its own study."
                )

    def _refuse_impossible(self, cells: tuple[Cell, ...]) -> None:
        """Raise ConfigError for a cell that fits no task."""
        for cell in cells:
            reasons = [_refusal(name, {**self._options_of(name), **cell}) for name in self._names]
            if all(reasons):
                first = self._names[0]
                if reasons[0] == _refusal(first, self._options_of(first)):  # whatever the cell
                    raise ConfigError(reasons[0])
                raise ConfigError(f"the cell {_text(cell)} fits no task of this study: {reasons[0]}")

    def _refuse_replaced(self) -> None:
        """Raise ConfigError for an option that every cell replaces."""
        cells = [*(self.cells or ({},)), *(self.test_cells or self.cells or ({},))]
        always = set.intersection(*(set(cell) for cell in cells))
        for name in self._names:
            replaced = sorted(always & self._options_of(name).keys())
            if replaced:
                raise ConfigError(f"task.options: {replaced[0]} is set by every cell; change task.cells instead.")

    def _options_of(self, name: str) -> dict[str, Any]:
        """Return the options of the study that a task has, and its own."""
        fields = _fields(name)
        common = {key: value for key, value in self.options.items() if key in fields}
        return {**common, **self.options.get(name, {})}


def _refusal(name: str, options: dict[str, Any]) -> str | None:
    """Return why a task cannot have these options, None where it can."""
    try:
        build_task(name, options)
    except ConfigError as error:
        return str(error)
    return None


@functools.cache
def _fields(name: str) -> frozenset[str]:
    return frozenset(type(build_task(name).config).model_fields)


def _refuse_unknown(options: Iterable[str], known: Collection[str], owner: str) -> None:
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown option {key!r} of {owner}: {nearest(key, known)}")


def _text(cell: Cell) -> str:
    return ", ".join(f"{key} {value}" for key, value in cell.items())
