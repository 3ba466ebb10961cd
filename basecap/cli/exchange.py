"""The commands that bring models out of a study and into one."""

from pathlib import Path
from typing import Annotated

import typer

from basecap.cli.options import Plugins, load_plugins
from basecap.errors import ConfigError


def export(
    run: Annotated[Path, typer.Argument(help="directory of a trained run: DIR/runs/NAME-sSEED")],
    to: Annotated[
        str,
        typer.Option("--to", metavar="DIR|hub:NAME", help="directory to make, or repository on the Hugging Face hub"),
    ],
    plugin: Plugins = [],
) -> None:
    """Write a trained model for transformers: weights, tokenizer and a card, in a folder or on the hub."""
    from basecap.run.trained import info_of

    info_of(run)  # a wrong directory is refused at once
    load_plugins(plugin)
    try:
        from basecap.hf.export import export as write
    except ImportError as error:
        raise ConfigError(f"{error}") from error
    typer.echo(f"model: {write(run, to)}")
