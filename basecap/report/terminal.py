"""A report on a terminal: the table of each study and its findings in words."""

import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from basecap.analysis.results import StudyResults, TaskResults, TextResults
from basecap.analysis.rows import Gap, Verdict
from basecap.analysis.tasks.recall_rows import AccuracyRow, TrainedRow
from basecap.report.summary import summarise, titles
from basecap.report.task_summary import between, percent
from basecap.report.text_summary import SIGNS, gap_text, interval_text, runs_text, worth_interval_text, worth_text

STYLES = {
    "keeps": "green",
    "degrades": "red",
    "undecided": "yellow",
    "early": "yellow",
    "maturity unknown": "yellow",
    "behind": "yellow",
    "none": "",
}
#: Verdict on a shift -> sign and style, as of a gap.
SHIFTS = {"holds": "keeps", "loses": "degrades", "undecided": "undecided", "untrained": "behind"}


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
        _table(title, study) if has_numbers else Text(title, style="bold"),
        Text(summary.headline, style="bold"),
        *(Text(f"- {reason}") for reason in summary.reasons),
        *([Text(summary.rates)] if summary.rates else []),
        *(Text(words, style="yellow") for words in summary.cautions),
        *failures,
    ]


def _table(title: str, study: StudyResults) -> Table:
    """Return the main table of a study."""
    return _verdicts(title, study) if isinstance(study, TextResults) else _accuracies(title, study)


def _verdicts(title: str, study: TextResults) -> Table:
    """Return a row per architecture of a study of text: its verdict, gap and interval."""
    signs = " (✓ keeps, ✗ degrades, ↻ early, ? undecided or unknown)" if study.ood_domains else ""
    heading = f"{title}: gap to {study.reference}, nats per token, intervals of all rows together{signs}"
    table = Table(title=Text(heading), title_justify="left")
    table.box = None
    domains = study.tested
    for column in ("architecture", *(["verdict"] if study.ood_domains else [])):
        table.add_column(column, no_wrap=True)
    for column in ("gap", "interval", "as if trained on", "weighted gap", "runs", *domains):
        table.add_column(Text(column), justify="right", overflow="fold")
    for row in study.comparisons:
        by_domain = {part.domain: part for part in row.domains}
        worth = f"{worth_text(row.gap)} ({worth_interval_text(row.gap)})" if row.gap else "–"
        table.add_row(
            Text(row.name),
            *([_verdict(row.verdict)] if study.ood_domains else []),
            gap_text(row.gap),
            interval_text(row.gap),
            worth,
            _signed(row.weighted),
            runs_text(row),
            *(_signed(by_domain.get(domain)) for domain in domains),
        )
    return table


def _verdict(verdict: Verdict) -> Text:
    return Text("–" if verdict == "none" else verdict, style=STYLES[verdict])


def _signed(found: Gap | None) -> Text:
    """Return a gap with the sign of its verdict: ✓ keeps, ✗ degrades, ↻ early, ? undecided or unknown."""
    if found is None or found.verdict == "none":
        return Text(gap_text(found))
    return Text(f"{gap_text(found)} {SIGNS[found.verdict]}", style=STYLES[found.verdict])


def _accuracies(title: str, study: TaskResults) -> Table:
    """Return a row per architecture and training task of a study of tasks: accuracy on each test task."""
    signs = f"✓ still recalls, ✗ loses, ? undecided, … own pattern below {100 * study.learned:g} %"
    if any(row.measured == "some" for row in study.trained):
        signs += ", in the cells trained in"
    table = Table(title=Text(f"{title}: accuracy in %, mean over cells ({signs})"), title_justify="left")
    table.box = None
    for column in ("architecture", "trained on"):
        table.add_column(column, no_wrap=True)
    table.add_column("runs", justify="right")
    for task in study.test:
        # A long name breaks at a hyphen, above numbers of up to 20 characters.
        table.add_column(Text(textwrap.fill(task, 20)), justify="right", overflow="fold")
    tests = {(row.architecture, row.train, row.test): row for row in study.tests}
    verdicts = {(row.architecture, row.train, row.test): row.verdict for row in study.shifts}
    for row in study.trained:
        key = row.architecture, row.train
        table.add_row(
            Text(row.architecture),
            Text(row.train),
            str(len(row.seeds)),
            *(_accuracy(tests.get((*key, task)), verdicts.get((*key, task)), row) for task in study.test),
        )
    return table


def _accuracy(found: AccuracyRow | None, verdict: str | None, trained: TrainedRow) -> Text:
    """Return an accuracy with its interval and the sign of its verdict."""
    if found is None:
        return Text("–")
    accuracy = found.accuracy
    if verdict is None and found.test == found.train and not trained.recalls:
        verdict = "untrained"
    of = SHIFTS[verdict] if verdict else "none"
    sign = f" {SIGNS[of]}" if verdict else "  "
    style = "bold" if found.test == found.train else STYLES[of]
    return Text(f"{percent(accuracy.value).removesuffix(' %')} ({between(accuracy)}){sign}", style=style)
