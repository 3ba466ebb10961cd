"""Options that several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from basecap.terminal import writable_file

#: The largest size that is taken: larger ones fit into no machine, and the largest into no number.
LARGEST = 2**20

StudyArgument = Annotated[str, typer.Argument(help="a built-in study (`basecap list studies`) or a YAML file")]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set", help="override a key of the study (`basecap list settings`), such as train.lr=3e-4; repeatable"
    ),
]
Scale = Annotated[
    str | None,
    typer.Option("--scale", help="size of the study: paper, or one of its `scales`, such as test, laptop, gpu"),
]
Plugins = Annotated[list[Path], typer.Option("--plugin", help="Python file that registers mixers; repeatable")]
Out = Annotated[
    Path | None, typer.Option("--out", help="directory of the study; runs/NAME or runs/NAME-SCALE when not given")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:0; the best there is when not given")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", callback=writable_file, help="also write everything to this file")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def load_plugins(plugins: Sequence[Path]) -> None:
    """Load plugin files; raises ConfigError for one that cannot be."""
    from basecap.registry import load_plugin

    for path in plugins:
        load_plugin(path)


def say(line: str) -> None:
    """Print a line on standard error."""
    typer.echo(line, err=True)
