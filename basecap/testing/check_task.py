"""Conformance checks of a task: its examples are a function of (seed, index), and its solver finds their targets."""

from collections.abc import Callable, Iterator

import numpy as np

from basecap.errors import ConfigError, describe_error
from basecap.mixers import error_location
from basecap.plugins import faults
from basecap.tasks import NOTHING, Instances, Task, asked, build_task

#: Examples that are made, and solved, of the cells that are checked: the first ones of the grid.
EXAMPLES, SOLVED, CELLS = 64, 16, 4
SEED = 3


def check_task(name: str) -> Iterator[tuple[str, str | None]]:
    """Yield the checks of a registered task, in each of a few cells, and what is wrong, None where nothing is.

    Only the mode `clean`, in which every query has one right answer, is compared with the solver.
    """
    try:
        task = build_task(name)
        with faults(f"task {name!r} cannot list its cells"):
            tasks = {_cell(task.at(cell)): task.at(cell) for cell in task.grid()[:CELLS]} or {_cell(task): task}
    except ConfigError as error:
        yield "can be built", str(error)
        return
    for cell, found in tasks.items():
        for check, wrong in _checks(found):
            yield f"{check}, {cell}", wrong


def _checks(task: Task) -> Iterator[tuple[str, str | None]]:
    try:
        made = task.instances(SEED, range(EXAMPLES))
    except (Exception, SystemExit) as error:  # the author's code may raise anything
        yield "makes examples", _described(error, task)
        return
    for name, check in CHECKS.items():
        try:
            yield name, check(task, made)
        except (Exception, SystemExit) as error:
            yield name, _described(error, task)


def _described(error: BaseException, task: Task) -> str:
    place = error_location(error, type(task))
    return f"{describe_error(error)} ({place})" if place else describe_error(error)


def _cell(task: Task) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in task.cell.items())


def _tokens(task: Task, made: Instances) -> str | None:
    """Return what is wrong with token ids and targets."""
    for what, array, lowest in (("inputs", made.inputs, 0), ("targets", made.targets, NOTHING)):
        wrong = array[(array < lowest) | (array >= task.vocabulary)]
        if wrong.size:
            return f"{what} hold {int(wrong[0])}, but token ids are 0 to {task.vocabulary - 1}"
    scored = made.groups != NOTHING
    if not scored.any(axis=1).all():
        return f"example {int(np.argmin(scored.any(axis=1)))} has no scored target; call canvas.ask"
    if (made.targets[scored] == NOTHING).any():
        return "a scored position has no target"
    return None


def _by_index(task: Task, made: Instances) -> str | None:
    """Return what is wrong with examples as a function of (seed, index)."""
    chosen = [EXAMPLES - 1, 0]
    again = task.instances(SEED, chosen)
    same = all(
        np.array_equal(array[chosen], getattr(again, name)) for name, array in vars(made).items() if array is not None
    )
    if not same:
        return "an example depends on the others that are made with it; take all random numbers from draws"
    if (made.inputs == made.inputs[:1]).all() or np.array_equal(
        task.instances(SEED + 1, range(EXAMPLES)).inputs, made.inputs
    ):
        return "examples do not differ by index and seed; take all random numbers from draws"
    return None


def _answers(task: Task, made: Instances) -> str | None:
    """Return where the solver and the targets disagree."""
    for row in range(SOLVED):
        places = asked(made, row).tolist()
        solved = task.solve(made.inputs[row], asked(made, row))
        for place in places:
            right = {int(made.targets[row, place])}
            if made.choices is not None:
                right = set(made.choices[row, made.groups[row, place]].tolist())
            if solved.get(place, frozenset()) != right:
                found = sorted(solved.get(place, frozenset()))
                return (
                    f"at position {place} of example {row} the target is {sorted(right)} and solve finds {found}; of "
                    "mode clean they are the same"
                )
    return None


CHECKS: dict[str, Callable[[Task, Instances], str | None]] = {
    "tokens and targets": _tokens,
    "examples by seed and index": _by_index,
    "one right answer": _answers,
}
