"""Runs the cells of a notebook in this process, as IPython would."""

import ast
import json
import shlex
from pathlib import Path
from string import Template
from typing import Any

from basecap.cli import app


def code_cells(notebook: Path) -> dict[str, str]:
    """Return the code cells of a notebook by their ids."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}


def play(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell with `names`, which it may change; return the value that a notebook displays, None without one.

    Of IPython it knows `%%writefile FILE` and lines that begin with `!basecap`, whose output it does not pass on.
    """
    first, _, rest = cell.partition("\n")
    if first.startswith("%%writefile "):
        return Path(first.removeprefix("%%writefile ")).write_text(f"{rest}\n") and None
    if cell.startswith("!basecap "):
        command = Template(cell.removeprefix("!basecap ").removesuffix(" 2>&1 | cat")).substitute(names)
        assert not app(shlex.split(command), standalone_mode=False)
        return None
    tree = ast.parse(cell)
    value = None
    if isinstance(tree.body[-1], ast.Expr):
        value = ast.Expression(tree.body.pop().value)
    exec(compile(tree, cell, "exec"), names)
    return None if value is None else eval(compile(value, cell, "eval"), names)
