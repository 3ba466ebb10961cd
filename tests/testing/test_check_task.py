"""`basecap check` on tasks: built-in ones pass, and each kind of mistake of an own one is named."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from basecap.cli import app
from basecap.plugins import load_plugin
from basecap.tasks import TASKS
from basecap.testing.check_task import CHECKS, check_task

OWN = """
import numpy
from basecap.tasks import ExampleDraws, task
from basecap.tasks.induction import Induction

class Short(Induction):
    def grid(self):
        return ({"length": 16, "vocab": 8}, {"length": 24, "vocab": 8})

"""
MAKE = "    def make(self, draws, canvas):\n        {}"
CLASS = '@task("{name}", source="here", summary="own")\nclass {cls}(Short):\n{body}\n\n'
#: Name of a task -> a method that is wrong, the check that finds it, and what is said.
WRONG = {
    "checked right": ("    pass", None, ""),
    "checked ids": (
        MAKE.format("super().make(draws, canvas); canvas.inputs[0, 2] = 8"),
        "tokens and targets",
        "inputs hold 8, but token ids are 0 to 7",
    ),
    "checked silent": (
        MAKE.format("canvas.inputs[:] = draws.below('tokens', self.length, 7)"),
        "tokens and targets",
        "example 0 has no scored target; call canvas.ask",
    ),
    "checked batch": (
        MAKE.format("super().make(draws, canvas); canvas.inputs[:, 0] = draws.size % 7"),
        "examples by seed and index",
        "an example depends on the others that are made with it",
    ),
    "checked seed": (
        MAKE.format("super().make(ExampleDraws(5, numpy.full(draws.size, 7)), canvas)"),
        "examples by seed and index",
        "examples do not differ by index and seed",
    ),
    "checked solver": (
        "    def solve(self, inputs, asked):\n        return {place: frozenset({7}) for place in asked.tolist()}",
        "one right answer",
        "solve finds [7]; of mode clean they are the same",
    ),
    "checked crash": (
        "    def solve(self, inputs, asked):\n        return 1 / 0",
        "one right answer",
        "ZeroDivisionError: division by zero (",
    ),
    "checked grid": (
        "    def grid(self):\n        return 1 / 0",
        "can be built",
        "cannot list its cells: ZeroDivisionError: division by zero (",
    ),
    "checked vocabulary": (
        "    vocabulary = property(lambda self: 1 / 0)",
        "can be built",
        "cannot be built: ZeroDivisionError: division by zero (",
    ),
}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("tasks") / "own_tasks.py"
    classes = [
        CLASS.format(name=name, cls=f"Own{number}", body=body)
        for number, (name, (body, *_)) in enumerate(WRONG.items())
    ]
    path.write_text(OWN + "".join(classes))
    TASKS.names()  # finds the built-in ones
    before = dict(TASKS._entries)
    load_plugin(path)
    yield path
    TASKS._entries = before  # other tests look at all tasks


@pytest.mark.parametrize("name", [name for name in TASKS.names() if not name.startswith("checked")])
def test_built_in_tasks_pass(name):
    assert {wrong for _, wrong in check_task(name)} == {None}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_named(name, plugin):
    _, check, words = WRONG[name]
    found = [(done.partition(",")[0], wrong) for done, wrong in check_task(name)]
    assert {done for done, _ in found} <= {*CHECKS, "makes examples", "can be built"}
    broken = {done: wrong for done, wrong in found if wrong is not None}
    assert (check is None and not broken) or (check in broken and words in broken[check])


def test_the_command_checks_the_tasks_of_a_plugin_alone(plugin):
    result = CliRunner().invoke(app, ["check", "--plugin", str(plugin), "--json"])
    rows = json.loads(result.stdout)
    assert {row["subject"] for row in rows} == set(WRONG) and result.exit_code == 1
    assert all(row["result"] == "passed" for row in rows if row["subject"] == "checked right")
