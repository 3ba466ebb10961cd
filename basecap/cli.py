"""The command line: arguments in, one call, printed answer. No logic lives here."""

import io
import logging
import signal
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from basecap import __version__
from basecap.cli_bench import bench_app
from basecap.cli_options import (
    LARGEST,
    AsJson,
    Device,
    Out,
    Plugins,
    Scale,
    Settings,
    StudyArgument,
    load_plugins,
    log,
)
from basecap.errors import BasecapError, ConfigError, Interrupted, nearest
from basecap.terminal import console, print_table

#: Arguments that typer refuses. Some of its releases take this class from click, others have one of their own.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# torch takes a second to import: every command imports what it needs once its arguments are known to be right, so that
# --help, the lists and what is refused answer at once.


class _Commands(TyperGroup):
    """Says something when interrupted, which typer alone does not."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            stopped = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
            if stopped.words:
                typer.echo(stopped.words, err=True)
            raise typer.Exit(128 + stopped.number) from error


app = typer.Typer(
    cls=_Commands,
    help="Does a sequence-mixing architecture keep the base capabilities of a Transformer?",
    epilog="Any command takes --debug to show the full trace of an error, -v to show which kernels run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
data_app = typer.Typer(help="Text to token shards.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"basecap {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: basecap run quickstart --out runs/first --set train.tokens=100000")
def run(
    study: StudyArgument,
    scale: Scale = None,
    out: Out = None,
    settings: Settings = [],
    only: Annotated[
        list[str], typer.Option("--only", help="run this architecture (and the reference); repeatable")
    ] = [],
    plugin: Plugins = [],
    device: Device = None,
    per_device: Annotated[
        int,
        typer.Option(
            "--per-device", "--per-gpu", min=1, max=64, help="runs at a time on each GPU, or on the CPU: small models"
        ),
    ] = 1,
    until_decided: Annotated[
        bool, typer.Option("--until-decided", help="add seeds until all rows are decided")
    ] = False,
    max_seeds: Annotated[
        int | None, typer.Option("--max-seeds", help="most seeds that --until-decided adds up to")
    ] = None,
) -> None:
    """Train and evaluate a study, then write its report. Run again to resume."""
    from basecap.study.config import load_study, select, with_named

    load_plugins(plugin)
    config = with_named(load_study(study, settings, scale), only)
    chosen = select(config, only)

    from basecap.records import StudyRecords
    from basecap.study.execute import execute
    from basecap.study.until_decided import seed_limit, train_until_decided

    directory = out or config.directory
    most = seed_limit(config, until_decided, max_seeds)
    train = partial(execute, out=directory, device=device, plugins=plugin, log=log, per_device=per_device)
    if most is None:
        infos = train(config, only=chosen)
    else:
        infos = train_until_decided(config, StudyRecords(directory), most, chosen, train, log)
    if not infos:  # a process that helps to train: the leading one reports
        return
    _report([directory], directory, said={(info["name"], info["seed"]) for info in infos if info["status"] == "failed"})
    failures = [row for found in StudyRecords(directory).results()["studies"] for row in found["failures"]]
    asked = {info["name"] for info in infos}  # what failed earlier is not this command's
    failed = [row["name"] for row in failures if row["name"] in asked]
    failed += [info["name"] for info in infos if info["status"] == "failed"]  # in a sweep, which the report leaves out
    if failed:
        count = len(set(failed))
        typer.echo(f"architectures that failed: {count}; the reasons are above and in the report.", err=True)
        raise typer.Exit(1)


@app.command(epilog="Example: basecap plan bc-figure-6a --scale gpu")
def plan(
    study: StudyArgument,
    scale: Scale = None,
    settings: Settings = [],
    plugin: Plugins = [],
    as_json: AsJson = False,
) -> None:
    """Say what a study would run and what it would cost. Runs nothing."""
    from basecap.study.config import load_study

    load_plugins(plugin)
    config = load_study(study, settings, scale)

    from basecap.study.estimate import estimate, remarks

    rows = estimate(config)
    print_table(f"plan of {config.title}", rows, as_json)
    for line in [] if as_json else remarks(config, rows, config.directory):
        typer.echo(line)


@app.command("eval", epilog="Example: basecap eval runs/quickstart --add influence-entropy --at end")
def eval_(
    place: Annotated[Path, typer.Argument(metavar="DIR|RUN", help="directory of a study or of one run")],
    add: Annotated[
        list[str], typer.Option("--add", help="evaluation that the study gets (`basecap list evals`); repeatable")
    ] = [],
    at: Annotated[str | None, typer.Option("--at", help="evaluation points: every, end or a number of tokens")] = None,
    only: Annotated[list[str], typer.Option("--only", help="evaluate this architecture; repeatable")] = [],
    plugin: Plugins = [],
    device: Device = None,
) -> None:
    """Evaluate stored weights where numbers are missing, without training, and write the report."""
    from basecap.records import RunRecords
    from basecap.study.stored import evaluate_directory

    load_plugins(plugin)
    failed = evaluate_directory(place, add=add, at=at, only=only, device=device, log=log)
    directory = place.parent.parent if RunRecords(place).info() else place
    _report([directory], directory)
    if failed:
        log(f"evaluations that failed: {failed}; the reasons are above.")
        raise typer.Exit(1)


@app.command(epilog="Example: basecap report runs/quickstart --tables runs/quickstart/tables")
def report(
    directories: Annotated[list[Path], typer.Argument(help="directories that `basecap run` wrote")],
    out: Annotated[
        Path | None, typer.Option("--out", help="where to write; the first directory when not given")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option("--tables", help="also write each table here as CSV, Markdown and LaTeX")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="write the report again while the study runs; ends when the study does")
    ] = False,
) -> None:
    """Analyse again and write the report, also over several studies."""
    from basecap.analysis import read_results
    from basecap.report import write_live_report, write_tables

    place = out or directories[0]
    if live:
        write_live_report(directories, place, log)
    _report(directories, place)
    if tables is not None:
        written = write_tables(read_results(place), tables)
        typer.echo(f"tables: {len(written)} files in {tables}")


@app.command("list", epilog="Example: basecap list mixers")
def list_(
    what: Annotated[str, typer.Argument(help="mixers, backbones, studies, evals, tasks, domains or settings")],
    plugin: Plugins = [],
    as_json: AsJson = False,
) -> None:
    """List what there is, one line each."""
    from basecap.catalogue import CATALOGUES

    load_plugins(plugin)
    if what not in CATALOGUES:
        raise ConfigError(f"cannot list {what!r}: {nearest(what, CATALOGUES)}")
    print_table(what, CATALOGUES[what](as_json), as_json)


@data_app.command("prepare", epilog="Example: basecap data prepare limited-mini --set data.path=/data/slimpajama")
def data_prepare(study: StudyArgument, scale: Scale = None, out: Out = None, settings: Settings = []) -> None:
    """Turn the study's text into token shards."""
    _inspect(study, scale, out, settings, as_json=False)


@data_app.command("inspect", epilog="Example: basecap data inspect quickstart --json; basecap data inspect mqar-k2v2")
def data_inspect(
    study: Annotated[str, typer.Argument(help="a study: name or YAML file; or a task (`basecap list tasks`)")],
    scale: Scale = None,
    out: Out = None,
    settings: Settings = [],
    as_json: AsJson = False,
    examples: Annotated[int, typer.Option(min=1, max=1000, help="how many of a task's examples to show")] = 2,
) -> None:
    """Say what is in the study's token shards, preparing them if need be; of a task show examples."""
    from basecap.catalogue import is_task

    if is_task(study):
        from basecap.tasks import inspect_task

        screen = console()
        screen.print(inspect_task(study, settings, examples, None if as_json else screen.width), soft_wrap=True)
    else:
        _inspect(study, scale, out, settings, as_json)


@app.command(epilog='Example: basecap generate runs/quickstart/runs/transformer++-s0 "The list of"')
def generate(
    run: Annotated[Path, typer.Argument(help="directory of a trained run: DIR/runs/NAME-sSEED")],
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="how many tokens to add")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="sample among the k most probable tokens")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="of the sampling")] = 0,
    device: Device = None,
    plugin: Plugins = [],
) -> None:
    """Continue a text with a trained model."""
    from basecap.study.continuation import continuation

    load_plugins(plugin)
    typer.echo(continuation(run, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed, device=device))


@app.command(epilog="Example: basecap check --mixer mamba-2")
def check(
    mixer: Annotated[
        list[str], typer.Option("--mixer", help="check this architecture; repeatable; all if absent")
    ] = [],
    length: Annotated[
        int,
        typer.Option(
            min=32, max=LARGEST, help="tokens of the sequence on which causality and decoding are proved once more"
        ),
    ] = 1100,
    device: Device = None,
    plugin: Plugins = [],
    only_failed: Annotated[bool, typer.Option("--failed", help="print only the checks that failed")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove every mixer and op against its reference on this machine: kernels on a GPU, else plain PyTorch.

    Exit code 1 when anything fails.
    """
    from basecap.environment import choose_device
    from basecap.testing.check_all import check_all, failures, lengths

    load_plugins(plugin)
    rows: list[dict[str, Any]] = []
    stopped = False
    try:
        check_all(mixer, choose_device(device), keep=rows.extend, longest=length)
    except KeyboardInterrupt:
        stopped = True
    failed = failures(rows)
    if failed or as_json or not only_failed:
        print_table("checks", failed if only_failed else rows, as_json)
    log(f"{len(rows)} checks, {len(failed)} failed; {lengths(length)}")
    if stopped:
        log("interrupted: the table holds what was checked so far.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _inspect(study: str, scale: str | None, out: Path | None, settings: Sequence[str], as_json: bool) -> None:
    from basecap.data import inspect
    from basecap.study.config import load_study
    from basecap.study.preparing import data_of

    config = load_study(study, settings, scale)
    data = data_of(config, out or config.directory)
    print_table(f"data of {config.title}", inspect(data), as_json)
    if data.remark:
        log(f"{data.remark}.")


def _report(directories: Sequence[Path], out: Path, said: Collection[tuple[str, int]] = ()) -> None:
    """Write the report and print its table, without failures of the runs (name, seed) that have been `said`."""
    from basecap.analysis import read_results
    from basecap.report import terminal_table, write_report

    page = write_report(list(directories), out)
    console().print(terminal_table(read_results(out), directories, said))
    typer.echo(f"report: {page}")


def main() -> None:
    """Run the command line: exit code 1 where runs or checks fail, 2 and a sentence for bad input, 128 + a signal."""
    debug = "--debug" in sys.argv
    if debug:
        _show_traces()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal's alphabet may lack what is printed
    if {"-v", "--verbose"} & set(sys.argv):
        logging.basicConfig(format="%(message)s")
        logging.getLogger("basecap").setLevel(logging.INFO)
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--debug", "-v", "--verbose")]
    try:
        sys.exit(app(arguments, prog_name="basecap", standalone_mode=False))
    except (BasecapError, _UsageError) as error:
        if debug:
            raise
        said = str(error) if isinstance(error, BasecapError) else _in_words(error)
        if said:  # else it was the help, which is printed
            typer.echo(f"error: {said}", err=True)
        sys.exit(2)


def _show_traces() -> None:
    """Show on stderr what is logged for --debug, such as the trace of a run that failed while others go on."""
    logger = logging.getLogger("basecap")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.DEBUG)


def _in_words(error: Any) -> str:
    """Return what typer says of arguments that it refuses, as one sentence; empty where it printed the help."""
    said = error.format_message()
    command = error.ctx.command_path if error.ctx else "basecap"
    return said and f"{said[0].lower()}{said[1:].rstrip('.')} (see `{command} --help`)."


if __name__ == "__main__":
    main()
