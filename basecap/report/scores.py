"""A table of scores: what was measured here, beside the published scores of a paper that a study reproduces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from basecap.analysis.results import AnswerRow, EvaluationRow, TextResults
from basecap.analysis.rows import Interval
from basecap.analysis.tasks.shares import over_runs
from basecap.report.figures.style import names_of
from basecap.report.published import published_figure

#: The entry of a column that training measures: tokens per second.
TRAINING = "training speed"

#: The entry of a column that is the mean of the others.
MEAN = "mean"

#: How an entry ends whose numbers are relative to that of the reference.
RELATIVE = " / reference"

#: The unit of numbers that are shown in percent, beside shares of answers.
SHARE = "share"


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number of a column, with its standard error, or, of a share of answers, its interval; shares in percent."""

    value: float
    stderr: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def estimate(self) -> float | Interval:
        """The number with its interval, if it has one."""
        if self.low is None or self.high is None:
            return self.value
        return Interval(value=self.value, low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """An architecture and its scores by column, None where there is none."""

    name: str
    published: list[float | None]
    measured: list[Score | None]


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """The rows, the columns that have any number, and the source of published numbers, None where there are none.

    `measured` says whether any score is ours.
    """

    rows: list[ScoreRow]
    columns: list[str]
    source: str | None
    measured: bool


def score_table(study: TextResults) -> ScoreTable | None:
    """Return the table of the study's `figure`; None without one, or without any number to show."""
    figure = published_figure(study)
    if figure is None or figure.kind != "scores":
        return None
    nothing = [None] * len(figure.columns)
    rows = [
        ScoreRow(
            name=name,
            published=list(figure.published.values.get(name, nothing)) if figure.published else [*nothing],
            measured=_with_mean(figure.measured, [_score(study, name, column) for column in figure.measured])
            or [*nothing],
        )
        for name in names_of(study)
    ]
    shown = [
        column
        for column in range(len(figure.columns))
        if any(row.published[column] is not None or row.measured[column] is not None for row in rows)
    ]
    if not shown:
        return None
    return ScoreTable(
        rows=[
            ScoreRow(
                name=row.name,
                published=[row.published[column] for column in shown],
                measured=[row.measured[column] for column in shown],
            )
            for row in rows
        ],
        columns=[figure.columns[column] for column in shown],
        source=figure.published.source if figure.published else None,
        measured=any(one is not None for row in rows for one in row.measured),
    )


def _score(study: TextResults, name: str, column: str | None) -> Score | None:
    """Return the number of an architecture that a column is, see `FigureConfig.measured`."""
    if column is None or not column.endswith(RELATIVE):
        return _absolute(study, name, column)
    own, base = (_absolute(study, one, column.removesuffix(RELATIVE)) for one in (name, study.reference))
    return Score(value=own.value / base.value) if own and base and base.value else None


def _absolute(study: TextResults, name: str, column: str | None) -> Score | None:
    """Return the mean over the runs of an architecture of the number that a column is, of speeds the median."""
    if column == TRAINING:
        rates = [run.tokens_per_s for run in study.runs if run.name == name and run.status == "finished"]
        known = [rate for rate in rates if rate]
        return Score(value=median(known)) if known else None
    for found in study.evaluations:
        rows = [
            row
            for row in found.rows
            if row.name == name and row.value is not None and column in (_place(row), f"{found.name} {_place(row)}")
        ]
        answers = [row for row in rows if isinstance(row, AnswerRow)]
        if answers:
            return _of_answers(answers)
        if rows:
            return _mean([_of_row(row, row.unit or found.unit) for row in rows])
    return None


def _place(row: EvaluationRow) -> str:
    """Return SUBSET METRIC of a number, and where it is on its axes: SUBSET METRIC, AXIS VALUE."""
    return ", ".join([f"{row.subset} {row.metric}", *(f"{axis} {value:.12g}" for axis, value in row.axis.items())])


def _of_row(row: EvaluationRow, unit: str) -> Score:
    factor = 100.0 if unit == SHARE else 1.0
    value = row.value or 0.0
    return Score(value=factor * value, stderr=None if row.stderr is None else factor * row.stderr)


def _of_answers(rows: Sequence[AnswerRow]) -> Score:
    found = over_runs(rows)
    return Score(value=100 * found.value, low=100 * found.low, high=100 * found.high)


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
