"""A study in words, whatever it was trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from basecap.analysis.results import StudyResults, TaskResults, TextResults
from basecap.analysis.rows import Row
from basecap.analysis.text.reasons import TEST_SCALE
from basecap.names import TEST, at_scale
from basecap.report.controls import controls_text
from basecap.report.parts_text import carried_text
from basecap.report.task_summary import recall_cautions, recall_headline, recall_question, recall_reasons
from basecap.report.text_summary import (
    added_after_a_table,
    headline,
    listed,
    question,
    rates_text,
    reasons,
    remarks,
    single_run_caution,
    trained_models_only,
    unfinished,
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A study in words.

    Attributes:
        question: of the study, in two sentences.
        headline: the findings in a sentence or two.
        reasons: a sentence each about rows without a decision, or findings that the headline leaves out.
        cautions: a sentence each that a reader must not overlook.
        rates: the learning rates that were chosen, "" where there was no sweep.
    """

    question: str
    headline: str
    reasons: list[str]
    cautions: list[str]
    rates: str


def titles(studies: Sequence[StudyResults], paths: Sequence[Path]) -> list[str]:
    """Return each study's name with its scale, and its directory too where another has the same name."""
    names = [at_scale(study.name, study.scale) for study in studies]
    named = zip(names, paths, strict=True)
    return [name if names.count(name) == 1 else f"{name} ({path})" for name, path in named]


def summarise(study: StudyResults) -> Summary:
    """Return a study in words."""
    return _text(study) if isinstance(study, TextResults) else _tasks(study)


def _text(study: TextResults) -> Summary:
    cautions = [
        trained_models_only(study),
        single_run_caution(study),
        added_after_a_table(study),
        unfinished(study),
        *remarks(study),
    ]
    advice_is_idle = study.scale == TEST and bool(study.points)
    needed = "do not need it" if study.ood_domains else "at equal training loss need it"
    return Summary(
        question=question(study),
        headline=TEST_SCALE if _is_test(study) else f"{headline(study)} {carried_text(study)}".strip(),
        reasons=[*([] if advice_is_idle else [*reasons(study), *controls_text(study)]), *_untrained(study)],
        cautions=[sentence for sentence in (*cautions, _without_log(study, f"gaps {needed}")) if sentence],
        rates=rates_text(study.sweep, "held-out text of the training domains"),
    )


def row_text(row: Row, study: TextResults) -> str:
    """Return what is said of a row: no advice that its scale cannot follow."""
    ran = any(point.name == row.name for point in study.points)
    return TEST_SCALE if study.scale == TEST and ran and row.gap is None else row.words


def table_text(row: Row, study: TextResults) -> str:
    """Return what the report's table says of a row: the sentence above it says what holds for all rows."""
    text, found = row_text(row, study), study.maturity
    if found is None or found.state == "mature":
        return text
    text = text.replace(f"too early; {found.words}", f"too early, as {study.reference} is")
    return text.replace(found.words, f"the maturity of {study.reference} is unknown")


def _is_test(study: TextResults) -> bool:
    """Whether nothing is compared only because the scale is meant to show that everything runs."""
    reference_ran = any(point.name == study.reference for point in study.points)
    return study.scale == TEST and reference_ran and all(row.gap is None for row in study.comparisons)


def _untrained(study: TextResults) -> list[str]:
    """Return a sentence on the architectures without runs, such as those that --only left out, if there are any."""
    ran = {run.name for run in study.runs}
    names = [name for name in study.names if name not in ran]
    return [f"Not trained: {listed(names)}."] if names else []


def _tasks(study: TaskResults) -> Summary:
    return Summary(
        question=recall_question(study),
        headline=recall_headline(study),
        reasons=recall_reasons(study),
        cautions=[*recall_cautions(study), *filter(None, [_without_log(study, "accuracies do not need it")])],
        rates=rates_text(study.sweep, "validation examples"),
    )


def _without_log(study: StudyResults, needed: str) -> str:
    """Return a sentence about runs whose training steps are not there, but their evaluations; "" without any."""
    runs = sum(run.seconds is None and run.tokens > 0 for run in study.runs)
    which = "all runs" if runs == len(study.runs) else f"{runs} of {len(study.runs)} runs"
    what = f"The training log (metrics.jsonl) of {which} is missing, and with it training loss, speed and time"
    return f"{what}; {needed}." if runs else ""
