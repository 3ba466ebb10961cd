"""The table of a paper that a study reproduces: published scores, and beside them what training itself measures."""

from dataclasses import dataclass
from statistics import median

from basecap.analysis.files import Figure
from basecap.analysis.results import TextResults
from basecap.report.figures.style import names_of

#: The column that training measures: tokens per second relative to the reference.
SPEED = "training speed"


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """An architecture: its training speed here, None if unknown, and its published scores, None where there is none."""

    name: str
    speed: float | None
    published: list[float | None]


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """The rows, the published columns, and the source of the published numbers; `measured` if any row has a speed."""

    rows: list[ScoreRow]
    columns: list[str]
    source: str
    measured: bool


def score_table(study: TextResults) -> ScoreTable | None:
    """Return the table of the study's `figure`; None if it has none."""
    found = study.settings.get("figure")
    figure = Figure.model_validate(found) if found else None
    if figure is None or figure.kind != "scores" or figure.published is None:
        return None
    speeds = _speeds(study) if SPEED in figure.columns else {}
    rows = [
        ScoreRow(name=name, speed=speeds.get(name), published=list(figure.published.values.get(name, ())))
        for name in names_of(study)
    ]
    return ScoreTable(rows=rows, columns=figure.columns, source=figure.published.source, measured=bool(speeds))


def _speeds(study: TextResults) -> dict[str, float]:
    """Return by architecture the median of its runs' tokens per second, relative to the reference's."""
    rates: dict[str, list[float]] = {}
    for run in study.runs:
        if run.status == "finished" and run.tokens_per_s:
            rates.setdefault(run.name, []).append(run.tokens_per_s)
    base = rates.get(study.reference)
    return {name: median(found) / median(base) for name, found in rates.items()} if base else {}
