"""The commands of `basecap data`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from basecap.cli.options import AsJson, Out, Plugins, Scale, Settings, StudyArgument, load_plugins, log
from basecap.cli.output import console, print_table
from basecap.errors import ConfigError

data_app = typer.Typer(help="Prepare and inspect the text of a study.", no_args_is_help=True)


@data_app.command("prepare", epilog="Example: basecap data prepare limited-mini --set data.path=/data/slimpajama")
def data_prepare(
    study: StudyArgument, scale: Scale = None, out: Out = None, settings: Settings = [], plugin: Plugins = []
) -> None:
    """Convert the text of a study to token shards and show what they hold."""
    load_plugins(plugin)
    _inspect(study, scale, out, settings, as_json=False)


@data_app.command("inspect", epilog="Example: basecap data inspect quickstart --json; basecap data inspect mqar-k2v2")
def data_inspect(
    study: Annotated[str, typer.Argument(help="a study: name or YAML file; or a task (`basecap list tasks`)")],
    scale: Scale = None,
    out: Out = None,
    settings: Settings = [],
    plugin: Plugins = [],
    as_json: AsJson = False,
    examples: Annotated[
        int | None, typer.Option(min=1, max=1000, help="number of examples of a task to show (default: 2)")
    ] = None,
) -> None:
    """Show what the token shards of a study hold, preparing them if needed, or examples of a task."""
    from basecap.cli.lists import is_task

    load_plugins(plugin)
    if is_task(study):
        if scale is not None or out is not None:
            raise ConfigError(f"{study} is a task and has no --scale or --out; set its options with --set.")
        from basecap.tasks import inspect_task

        screen = console()
        screen.print(inspect_task(study, settings, examples or 2, None if as_json else screen.width), soft_wrap=True)
    elif examples is not None:
        raise ConfigError(f"--examples are those of a task, and {study} is none; see `basecap list tasks`.")
    else:
        _inspect(study, scale, out, settings, as_json)


def _inspect(study: str, scale: str | None, out: Path | None, settings: Sequence[str], as_json: bool) -> None:
    from basecap.data import inspect
    from basecap.plan.workloads import data_of
    from basecap.study.config import load_study
    from basecap.train.interruption import listening

    config = load_study(study, settings, scale)
    with listening():
        data = data_of(config, out or config.directory)
    print_table(f"data of {config.title}", inspect(data), as_json)
    if data.remark:
        log(f"{data.remark}.")
