"""Output of the command line: tables on the terminal and files written with --json."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from basecap.errors import ConfigError

if TYPE_CHECKING:
    from basecap.records.status import RunStatus

#: Width up to which the words of a column are kept in one line.
NARROW = 10


def print_table(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table or as JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        cells = [row.get(column) for row in rows]
        number = all(isinstance(cell, int | float | None) for cell in cells)
        wide = max(map(len, (*column.split(), *map(_cell, cells))))
        whole = number or column == columns[0] or wide <= NARROW  # a number in two lines reads as another one
        table.add_column(
            textwrap.fill(column, wide, break_long_words=False),
            justify="right" if number else "left",
            no_wrap=whole,
            min_width=wide if whole else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    screen = console()
    needed = screen.measure(table, options=screen.options.update(width=sys.maxsize)).minimum
    screen.width = max(screen.width, needed)
    screen.print(table)


def print_sentence(sentence: str) -> None:
    """Print a sentence, broken between words where a terminal is narrower."""
    console().print(sentence, soft_wrap=not sys.stdout.isatty())


def console() -> Console:
    """Return a console on standard output, 160 columns wide when that is not a terminal."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 160)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def status_row(run: "RunStatus") -> dict[str, Any]:
    """Return the row of a run for `basecap status`."""
    return {
        "run": run.name,
        "seed": run.seed,
        "state": run.state,
        "tokens": run.tokens,
        "of": run.total,
        "loss": run.loss,
        "tokens/s": run.rate,
        "seconds left": None if run.seconds_left is None else round(run.seconds_left),
        **({"why": run.message} if run.message else {}),
    }


def status_line(runs: Sequence["RunStatus"]) -> str:
    """Return the sentence about all runs for `basecap status`."""
    from basecap.records.status import time_left
    from basecap.system.progress import duration

    counts = Counter[str](run.state for run in runs)
    states = ("finished", "training", "stopped", "failed", "waiting", "imported")
    parts = [f"{counts[state]} {state}" for state in states if counts[state]]
    left = time_left(runs)
    end = "" if left is None else f"; about {duration(left)} left at this pace, without evaluations"
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}: {', '.join(parts)}{end}."


def report_output_error(error: OSError) -> int:
    """Print why standard output cannot be written, unless its reader has ended; return the exit code."""
    from basecap.system.files import write_error

    with contextlib.suppress(OSError, ValueError):  # Python would complain again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    typer.echo(f"error: {write_error(error)} and run again.", err=True)
    return 2


def writable_file(path: Path | None) -> Path | None:
    """Return the resolved path of a file to write; raises ConfigError early when it could not be written later."""
    from basecap.system.files import real_path  # imports pydantic, which --help does not need

    if path is None:
        return None
    file = real_path(path)  # write through a link instead of replacing it
    special = file.exists() and not file.is_file()  # a directory, or a device that would be replaced
    protected = file.exists() and not os.access(file, os.W_OK)
    if special or protected or not _takes_files(file.parent):
        raise ConfigError(f"--json {path} cannot be written; give a file in a writable directory.")
    return file


def _takes_files(directory: Path) -> bool:
    """Whether a file can be made in a directory; its mode does not tell for every user and file system."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def store(found: dict[str, Any], path: Path | None) -> None:
    """Write `found` as JSON to `path` unless that is None; raises DataError when the file cannot be written."""
    from basecap.system.files import replacing  # imports pydantic, which --help does not need

    if path is not None:
        with replacing(path, other="another file with --json") as file:
            file.write(json.dumps(found, indent=1).encode() + b"\n")
