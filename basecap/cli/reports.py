"""What `basecap run`, `eval` and `report` print of the report that they write."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from basecap.cli.options import log
from basecap.cli.output import console, print_sentence, print_table
from basecap.errors import BasecapError, ConfigError

if TYPE_CHECKING:
    from basecap.records import RunInfo
    from basecap.report import ImageFormat, Report


def report_runs(infos: Sequence["RunInfo"], directory: Path) -> None:
    """Write the report of a study that was trained; exit with code 1 where an architecture failed."""
    failed_runs = {(info.name, info.seed) for info in infos if info.status == "failed"}
    later = f"The runs are stored; `basecap report {directory}` writes the report."
    try:
        made = print_report([directory], directory, reported=failed_runs)
    except BasecapError as error:
        raise type(error)(f"{error} {later}") from error
    except ImportError as error:  # of a library that only reports need
        raise ConfigError(
            f"the report needs a library that cannot be imported ({error}); install it. {later}"
        ) from error
    failures = [failure.name for study in made.studies for failure in study.failures]
    asked = {info.name for info in infos}  # failures of earlier commands do not count
    failed = [name for name in failures if name in asked]
    failed += [info.name for info in infos if info.status == "failed"]  # runs of a sweep are not in the report
    if failed:
        typer.echo(f"architectures that failed: {len(set(failed))}; the reasons are above and in the report.", err=True)
        raise typer.Exit(1)


def print_report(
    directories: Sequence[Path],
    out: Path,
    reported: Collection[tuple[str, int]] = (),
    *,
    shown: Collection[str] = (),
    costs: Sequence[Path] = (),
    images: "ImageFormat | None" = None,
) -> "Report":
    """Write the report and print its table, without the failures of runs (name, seed) that are already `reported`.

    The numbers of the evaluations that are to be `shown` are printed, too.
    """
    from basecap.report import joined_sentences, numbers_of, terminal_table, write_report
    from basecap.system.progress import phase

    with phase("report"):
        report = write_report(list(directories), out, costs=costs, images=images)
    console().print(terminal_table(report.studies, directories, reported))
    for found in (found for study in report.studies for found in study.evaluations if found.name in shown):
        print_table(f"{found.name}: runs at their last evaluation points", numbers_of(found), as_json=False)
    for sentence in () if report.joined is None else joined_sentences(report.joined):
        print_sentence(sentence)
    typer.echo(f"report: {report.page}")
    if report.without_charts:
        log(f"Warning: the report has no charts: {report.without_charts}")
    if report.figures:
        typer.echo(f"figures: {len(report.figures)} files in {report.figures[0].parent}")
    return report
