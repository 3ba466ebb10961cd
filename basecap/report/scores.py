"""The table of a paper that a study reproduces: published scores, and beside them what was measured here."""

import math
from dataclasses import dataclass
from statistics import fmean, median

from basecap.analysis.files import Figure
from basecap.analysis.results import TextResults
from basecap.report.figures.style import names_of

#: The column that training measures: tokens per second relative to the reference.
SPEED = "training speed"

#: The evaluation that measures scores, and the entry of a column that is the mean of the others.
EVALUATION, MEAN = "few-shot", "mean"


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number of a column, with its standard error: a perplexity, or a share in percent."""

    value: float
    stderr: float | None


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """An architecture: its training speed here, None if unknown, and by column its scores, None where there is none."""

    name: str
    speed: float | None
    published: list[float | None]
    measured: list[Score | None]


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """The rows, the published columns, and the source of the published numbers.

    `timed` and `measured` say whether any row has a speed and a score of ours.
    """

    rows: list[ScoreRow]
    columns: list[str]
    source: str
    timed: bool
    measured: bool


def score_table(study: TextResults) -> ScoreTable | None:
    """Return the table of the study's `figure`; None if it has none."""
    found = study.settings.get("figure")
    figure = Figure.model_validate(found) if found else None
    if figure is None or figure.kind != "scores" or figure.published is None:
        return None
    speeds = _speeds(study) if SPEED in figure.columns else {}
    rows = [
        ScoreRow(
            name=name,
            speed=speeds.get(name),
            published=list(figure.published.values.get(name, ())),
            measured=_with_mean(figure.measured, [_score(study, name, column) for column in figure.measured]),
        )
        for name in names_of(study)
    ]
    return ScoreTable(
        rows=rows,
        columns=figure.columns,
        source=figure.published.source,
        timed=bool(speeds),
        measured=any(one is not None for row in rows for one in row.measured),
    )


def _score(study: TextResults, name: str, column: str | None) -> Score | None:
    """Return the mean over the runs of an architecture of the number that a column is: TASK METRIC."""
    rows = [
        row
        for found in study.evaluations
        if found.name == EVALUATION
        for row in found.rows
        if row.name == name and f"{row.subset} {row.metric}" == column and row.value is not None
    ]
    if not rows:
        return None
    unit = 1.0 if rows[0].metric.endswith("perplexity") else 100.0
    return _mean([Score(value=unit * (row.value or 0.0), stderr=_times(unit, row.stderr)) for row in rows])


def _with_mean(columns: list[str | None], scores: list[Score | None]) -> list[Score | None]:
    """Return the scores with the mean of the others in the column of that name, where all of them are known."""
    others = [score for column, score in zip(columns, scores, strict=True) if column not in (MEAN, None)]
    known = [score for score in others if score is not None]
    mean = _mean(known) if known and len(known) == len(others) else None
    return [mean if column == MEAN else score for column, score in zip(columns, scores, strict=True)]


def _mean(scores: list[Score]) -> Score:
    errors = [score.stderr for score in scores if score.stderr is not None]
    error = math.hypot(*errors) / len(scores) if len(errors) == len(scores) else None
    return Score(value=fmean(score.value for score in scores), stderr=error)


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _speeds(study: TextResults) -> dict[str, float]:
    """Return by architecture the median of its runs' tokens per second, relative to the reference's."""
    rates: dict[str, list[float]] = {}
    for run in study.runs:
        if run.status == "finished" and run.tokens_per_s:
            rates.setdefault(run.name, []).append(run.tokens_per_s)
    base = rates.get(study.reference)
    return {name: median(found) / median(base) for name, found in rates.items()} if base else {}
