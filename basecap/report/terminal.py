"""A report on a terminal: the table of each study and its findings in words."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from basecap.analysis.results import StudyResults, TextResults
from basecap.report.summary import summarise, titles
from basecap.report.tables import table_of


def terminal_table(
    studies: Sequence[StudyResults], paths: Sequence[Path], reported: Collection[tuple[str, int]] = ()
) -> Group:
    """Return what `rich` prints: of each study, in `paths`, its table and its findings in words.

    Failures of the runs (name, seed) that are already `reported` are left out.
    """
    named = zip(titles(studies, paths), studies, strict=True)
    return Group(*(part for title, study in named for part in (*_study(title, study, reported), Text())))


def _study(title: str, study: StudyResults, reported: Collection[tuple[str, int]]) -> list[Table | Text]:
    summary = summarise(study)
    failures = [
        Text(f"failed: {failure.name} (seed {failure.seed}): {failure.message}", style="red")
        for failure in study.failures
        if (failure.name, failure.seed) not in reported
    ]
    # Without a number there is no table: the findings in words say why.
    has_numbers = not isinstance(study, TextResults) or any(row.gap is not None for row in study.comparisons)
    return [
        table_of(title, study) if has_numbers else Text(title, style="bold"),
        Text(summary.headline, style="bold"),
        *(Text(f"- {reason}") for reason in summary.reasons),
        *([Text(summary.rates)] if summary.rates else []),
        *(Text(words, style="yellow") for words in summary.cautions),
        *failures,
    ]
