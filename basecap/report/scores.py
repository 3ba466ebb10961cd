"""A table of scores: what was measured here, beside the published scores of a paper that a study reproduces."""

import math
from dataclasses import dataclass
from statistics import fmean, median

from basecap.analysis.results import TextResults
from basecap.report.figures.style import names_of
from basecap.report.published import published_figure

#: The column that training measures: tokens per second relative to the reference.
SPEED = "training speed"

#: The entry of a column that is the mean of the others.
MEAN = "mean"

#: The unit of numbers that are shown in percent.
SHARE = "share"


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number of a column, with its standard error; a share is in percent."""

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
    """The rows, the columns of scores, and the source of published numbers, None where there are none.

    `timed` and `measured` say whether any row has a speed and a score of ours.
    """

    rows: list[ScoreRow]
    columns: list[str]
    source: str | None
    timed: bool
    measured: bool


def score_table(study: TextResults) -> ScoreTable | None:
    """Return the table of the study's `figure`; None without one, or without any number to show."""
    figure = published_figure(study)
    if figure is None or figure.kind != "scores":
        return None
    speeds = _speeds(study) if SPEED in figure.columns else {}
    rows = [
        ScoreRow(
            name=name,
            speed=speeds.get(name),
            published=list(figure.published.values.get(name, ())) if figure.published else [],
            measured=_with_mean(figure.measured, [_score(study, name, column) for column in figure.measured]),
        )
        for name in names_of(study)
    ]
    measured = any(one is not None for row in rows for one in row.measured)
    if figure.published is None and not speeds and not measured:
        return None
    return ScoreTable(
        rows=rows,
        columns=figure.columns if figure.published or measured else [],
        source=figure.published.source if figure.published else None,
        timed=bool(speeds),
        measured=measured,
    )


def _score(study: TextResults, name: str, column: str | None) -> Score | None:
    """Return the mean over the runs of an architecture of the number that a column is.

    That is SUBSET METRIC of the first evaluation that has it, or EVALUATION SUBSET METRIC.
    """
    for found in study.evaluations:
        scores = [
            Score(value=factor * row.value, stderr=None if row.stderr is None else factor * row.stderr)
            for row in found.rows
            if row.name == name and row.value is not None
            if column in (f"{row.subset} {row.metric}", f"{found.name} {row.subset} {row.metric}") and not row.axis
            for factor in [100.0 if (row.unit or found.unit) == SHARE else 1.0]
        ]
        if scores:
            return _mean(scores)
    return None


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


def _speeds(study: TextResults) -> dict[str, float]:
    """Return by architecture the median of its runs' tokens per second, relative to the reference's."""
    rates: dict[str, list[float]] = {}
    for run in study.runs:
        if run.status == "finished" and run.tokens_per_s:
            rates.setdefault(run.name, []).append(run.tokens_per_s)
    base = rates.get(study.reference)
    return {name: median(found) / median(base) for name, found in rates.items()} if base else {}
