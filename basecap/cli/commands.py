"""The command line: parse arguments, make one call, print the answer. No logic lives here."""

import gc
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from basecap.cli.audit import audit
from basecap.cli.bench import bench_app
from basecap.cli.check import check, guard
from basecap.cli.data import data_app
from basecap.cli.exchange import export, import_
from basecap.cli.generate import generate
from basecap.cli.options import (
    LARGEST,
    AllowUnproved,
    AsJson,
    Device,
    ExecutorName,
    Figures,
    MaxSeeds,
    Only,
    Out,
    PerDevice,
    Plugins,
    Profile,
    RaySettings,
    RunsPerDevice,
    Scale,
    Settings,
    SlurmSettings,
    StudyArgument,
    Threads,
    Track,
    UntilDecided,
    executor_settings,
    load_plugins,
    log,
    seed_limit,
)
from basecap.cli.output import print_sentence, print_table, report_output_error
from basecap.cli.reports import print_report, report_runs
from basecap.cli.usage import UsageError, refuse_empty, usage_message
from basecap.errors import BasecapError, ConfigError, Interrupted
from basecap.system.streams import protect_streams
from basecap.version import __version__

# torch takes a second to import: each command imports what it needs after it has checked its arguments, so that --help,
# lists and error messages come at once.


#: Commands that keep what they have done when they are interrupted.
RESUMED = ("run", "eval", "data")


class _Commands(TyperGroup):
    """Prints a message when interrupted, which typer alone does not."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            again = "; run the same command again to resume" if ctx.invoked_subcommand in RESUMED else ""
            stopped = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT, f"interrupted{again}.")
            if stopped.message:
                typer.echo(stopped.message, err=True)
            raise typer.Exit(128 + stopped.number) from error


app = typer.Typer(
    cls=_Commands,
    help="Does a sequence-mixing architecture keep the base capabilities of a Transformer?",
    epilog="Every command takes --debug to show the full traceback of an error and -v to show which kernels run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
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
    only: Only = [],
    plugin: Plugins = [],
    device: Device = None,
    per_device: RunsPerDevice = "1",
    executor: ExecutorName = "local",
    slurm: SlurmSettings = None,
    ray: RaySettings = None,
    threads: Threads = None,
    allow_unproved: AllowUnproved = False,
    track: Track = [],
    profile: Profile = None,
    until_decided: UntilDecided = False,
    max_seeds: MaxSeeds = None,
) -> None:
    """Train and evaluate a study, then write its report. Run the same command again to resume."""
    from basecap.study.config import load_study, select, with_named

    load_plugins(plugin)
    tuned = executor_settings(executor, {"slurm": slurm, "ray": ray})
    config = with_named(load_study(study, settings, scale), only)
    chosen = select(config, only, hint_at_set=True)
    most = seed_limit(config, until_decided, max_seeds)

    from basecap.records import StudyRecords
    from basecap.report import without_charts  # here, so that what a report needs is not first missed after training
    from basecap.run.execute import execute
    from basecap.run.executors import Resources
    from basecap.run.until_decided import train_until_decided
    from basecap.run.watching import watching

    directory = out or config.directory
    if why := without_charts():
        log(f"Warning: the report will have no charts: {why}")
    train = partial(
        execute,
        out=directory,
        on=Resources(device=device, per_device=per_device, executor=executor, settings=tuned, threads=threads),
        plugins=plugin,
        log=log,
        allow_unproved=allow_unproved,
        watching=watching(track, profile),
    )
    if most is None:
        infos = train(config, only=chosen)
    else:
        infos = train_until_decided(config, StudyRecords(directory), most, chosen, train, log)
    if infos:  # else a worker of torchrun: only the leader reports
        report_runs(infos, directory)


@app.command(epilog="Example: basecap plan bc-figure-6a --scale gpu")
def plan(
    study: StudyArgument,
    scale: Scale = None,
    out: Out = None,
    settings: Settings = [],
    only: Only = [],
    plugin: Plugins = [],
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, max=LARGEST, help="also print the time on this number of large GPUs")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a study would run and what it would cost. Trains nothing.

    Exits with code 2 if the study's text or tokenizer, or what an evaluation needs, is missing.
    """
    from basecap.study.config import load_study, restrict, select, with_named

    load_plugins(plugin)
    config = with_named(load_study(study, settings, scale), only)
    config = restrict(config, select(config, only, hint_at_set=True))

    from basecap.plan.checks import check
    from basecap.plan.estimate import estimate, readable, remarks
    from basecap.plan.needs import missing

    directory = out or config.directory
    planned = check(config)
    rows = estimate(planned, directory)
    print_table(f"plan of {config.title}", rows if as_json else readable(rows), as_json)
    for line in [] if as_json else remarks(planned, rows, directory, gpus):
        print_sentence(line)
    if absent := missing(planned, directory):
        raise ConfigError(" ".join(f"missing: {sentence}" for sentence in absent))


@app.command(epilog="Example: basecap status runs/quickstart")
def status(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory that `basecap run` writes")],
    as_json: AsJson = False,
) -> None:
    """Show how far the runs of a study are, from its records alone: also while it runs elsewhere."""
    from basecap.cli.output import status_line, status_row
    from basecap.records import StudyRecords
    from basecap.records.status import study_status

    runs = study_status(StudyRecords(directory))
    print_table(f"status of {directory}", [status_row(run) for run in runs], as_json)
    if not as_json:
        typer.echo(status_line(runs))


@app.command("eval", epilog="Example: basecap eval runs/quickstart --add influence-entropy --at end")
def eval_(
    path: Annotated[Path, typer.Argument(metavar="DIR|RUN", help="directory of a study or of one run")],
    add: Annotated[
        list[str],
        typer.Option(
            "--add",
            help="add this evaluation (`basecap list evals`) to the study: NAME or 'NAME: {option: value}'; repeatable",
        ),
    ] = [],
    at: Annotated[
        str | None, typer.Option("--at", help="only at these evaluation points: every, end or a number of tokens")
    ] = None,
    only: Annotated[list[str], typer.Option("--only", help="evaluate only this architecture; repeatable")] = [],
    plugin: Plugins = [],
    device: Device = None,
    per_device: PerDevice = 1,
    executor: ExecutorName = "local",
    slurm: SlurmSettings = None,
    ray: RaySettings = None,
) -> None:
    """Run missing evaluations on stored weights, without training, then write the report."""
    from basecap.records import RunRecords, StudyRecords
    from basecap.records.evaluation_points import parse_at

    tuned = executor_settings(executor, {"slurm": slurm, "ray": ray})
    points = None if at is None else parse_at(at)
    directory = RunRecords(path).study if RunRecords(path).info() is not None else path
    StudyRecords(directory).study()
    load_plugins(plugin)

    from basecap.run.executors import Resources
    from basecap.run.stored_weights import added, evaluate_directory

    on = Resources(device=device, per_device=per_device, executor=executor, settings=tuned)
    failed = evaluate_directory(path, add=add, at=points, only=only, on=on, plugins=plugin, log=log)
    if failed is None:  # a worker of torchrun: only the leader reports
        return
    print_report([directory], directory, shown={added(text) for text in add})
    if failed:
        log(f"evaluations that failed: {failed}; the reasons are above.")
        raise typer.Exit(1)


@app.command(epilog="Example: basecap report runs/limited-zoo runs/lp-table-1-gpu --costs generate.json --out both")
def report(
    directories: Annotated[list[Path], typer.Argument(help="directories that `basecap run` wrote")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="directory to write to, needed for several studies (default: that of the study)"),
    ] = None,
    tables: Annotated[
        Path | None, typer.Option("--tables", file_okay=False, help="also write tables here as CSV, Markdown and LaTeX")
    ] = None,
    costs: Annotated[
        list[Path],
        typer.Option("--costs", help="what `basecap bench models` or `bench generate` wrote with --json; repeatable"),
    ] = [],
    figures: Figures = None,
    live: Annotated[
        bool, typer.Option("--live", help="update the report while the study runs; stops when the study ends")
    ] = False,
) -> None:
    """Analyse one or several studies again and write one report, which joins several: gaps, recall and costs."""
    from basecap.report import joined_sheets, write_live_report, write_tables

    # Modules stay, so no later search for cycles goes through them: 0.17 of 2.8 s (CPU time) of a report of 98 runs.
    gc.freeze()
    directory = out or directories[0]
    if live:
        write_live_report(directories, directory, log, costs)
    made = print_report(directories, directory, costs=costs, images=figures)
    if tables is not None:
        sheets = [] if made.joined is None else list(joined_sheets(made.joined))
        written = write_tables(made.studies, tables, sheets)
        typer.echo(f"tables: {len(written)} files in {tables}")


@app.command("list", epilog="Example: basecap list mixers")
def list_(
    what: Annotated[str, typer.Argument(help="mixers, backbones, studies, evals, tasks, domains or settings")] = "",
    plugin: Plugins = [],
    as_json: AsJson = False,
) -> None:
    """List the available mixers, studies, evaluations and so on, one line each."""
    from basecap.cli.lists import catalogue

    load_plugins(plugin)
    title, rows = catalogue(what, as_json)
    print_table(title, rows, as_json)


app.command(epilog='Example: basecap generate runs/quickstart/runs/transformer++-s0 "The list of" "In" --stop .')(
    generate
)
app.command(epilog="Example: basecap check --mixer mamba-2")(check)
app.command(epilog="Example: basecap audit mamba-2")(audit)
app.command(epilog="Example: basecap export runs/quickstart/runs/rwkv-7-s0 --to exported/rwkv-7")(export)
app.command("import", epilog="Example: basecap import pythia-160m --out runs/quickstart")(import_)


def main() -> None:
    """Run the command line.

    Exit code 1 when runs or checks fail, 2 for invalid input, 128 plus the number of a signal that ended it.
    """
    debug = "--debug" in sys.argv
    protect_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if debug:
        _show_traces()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack some characters
    if {"-v", "--verbose"} & set(sys.argv):
        logging.basicConfig(format="%(message)s")
        logging.getLogger("basecap").setLevel(logging.INFO)
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--debug", "-v", "--verbose")]
    done = guard(arguments)
    try:
        refuse_empty(arguments)
        code = app(arguments, prog_name="basecap", standalone_mode=False)
        done()
        sys.exit(code)
    except (BasecapError, UsageError) as error:
        if debug:
            raise
        message = str(error) if isinstance(error, BasecapError) else usage_message(error, _called(arguments))
        if message:  # empty after `--help`
            typer.echo(f"error: {message}", err=True)
        sys.exit(2)
    except OSError as error:  # pathlib's questions, such as is_file, raise it where a directory may not be entered
        if debug:
            raise
        if error.filename is None:
            sys.exit(report_output_error(error))
        typer.echo(
            f"error: {error.filename} cannot be read ({error.strerror}); fix that or give another path.", err=True
        )
        sys.exit(2)


def _called(arguments: Sequence[str]) -> str:
    """Return the part of the command line that names a command."""
    command: Any = typer.main.get_command(app)
    path = ["basecap"]
    for word in arguments:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        path.append(word)
    return " ".join(path)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; end the process within an import, as libraries hide the error there or raise another."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"interrupted.\n")
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _show_traces() -> None:
    """Print debug logs to stderr, such as the traceback of a failed run while other runs continue."""
    logger = logging.getLogger("basecap")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.DEBUG)
