"""Answers on the terminal: tables, sentences, and files written with --json."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from basecap.errors import ConfigError


def print_table(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows of equal keys as a table, or as JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        number = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(column, justify="right" if number else "left", no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console().print(table)


def console() -> Console:
    """Return standard output, 160 columns wide where it is no terminal."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def writable_file(path: Path | None) -> Path | None:
    """Refuse a file that could not be replaced, before hours are spent on what is to stand in it."""
    if path is None:
        return None
    file = path.resolve()  # a link stays one
    places = [file, file.parent] if file.exists() else [file.parent]
    foreign = file.exists() and not file.is_file()  # a directory, or a device that would be replaced
    if foreign or not file.parent.is_dir() or not all(os.access(place, os.W_OK) for place in places):
        raise ConfigError(f"--json {path} cannot be written; give a file in a directory that you may write to.")
    return file


def store(found: dict[str, Any], path: Path | None) -> None:
    """Write what was found as JSON, unless there is no path; raises DataError when it cannot be written."""
    from basecap.files import replacing  # numpy, which --help does not need

    if path is not None:
        with replacing(path, other="another file with --json") as file:
            file.write(json.dumps(found, indent=1).encode() + b"\n")
