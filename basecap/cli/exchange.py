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
    step: Annotated[
        int | None, typer.Option("--step", help="training step of weights that are stored (default: the last)")
    ] = None,
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
    typer.echo(f"model: {write(run, to, step)}")


def import_(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="folder of a model of the hub: config.json, safetensors, tokenizer.json"),
    ],
    out: Annotated[Path, typer.Option("--out", help="directory of a study of text that takes the model")],
    name: Annotated[str | None, typer.Option("--name", help="its name in tables (default: that of the folder)")] = None,
    plugin: Plugins = [],
) -> None:
    """Take a model that was trained elsewhere into a study, whose report shows it beside the study's own."""
    from basecap.records import StudyRecords

    StudyRecords(out).study()
    load_plugins(plugin)

    from basecap.families.bring_in import import_model

    made = import_model(folder, out, name)
    typer.echo(f"imported: {made.path}; measure it with `basecap eval {out}`")
