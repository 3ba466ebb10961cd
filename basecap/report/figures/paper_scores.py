"""A table of scores, a row per architecture: figure 2c and the tables of the first paper (arXiv 2505.18522)."""

from statistics import median

from basecap.analysis.files import Figure
from basecap.analysis.results import TextResults
from basecap.report.figures.spec import Rows, Spec, chart, layer
from basecap.report.figures.style import names_of, ref
from basecap.report.palette import BLACK, DARK_GREY

#: The column that training itself measures: tokens per second relative to the reference.
SPEED = "training speed"


def scores(study: TextResults, figure: Figure) -> tuple[Spec | None, Spec | None]:
    """Return the columns that are measured here, and the published table."""
    names, measured = names_of(study), None
    ours = [{"name": name, "column": SPEED, "text": f"{value:.2f}"} for name, value in _speeds(study).items()]
    if ours and SPEED in figure.columns:
        measured = _table(ours, [SPEED], names, BLACK, "measured here")
    published = figure.published
    if published is None:
        return measured, None
    theirs = [
        {"name": name, "column": column, "text": "–" if value is None else f"{value:.2f}"}
        for name in names
        for column, value in zip(figure.columns, published.values.get(name, ()), strict=False)
    ]
    return measured, _table(theirs, figure.columns, names, DARK_GREY, f"published: {published.source}")


def _speeds(study: TextResults) -> dict[str, float]:
    """Return by architecture the median of its runs' tokens per second, relative to the reference's."""
    rates: dict[str, list[float]] = {}
    for run in study.runs:
        if run.status == "finished" and run.tokens_per_s:
            rates.setdefault(run.name, []).append(run.tokens_per_s)
    base = rates.get(study.reference)
    return {name: median(found) / median(base) for name, found in rates.items()} if base else {}


def _table(rows: Rows, columns: list[str], names: list[str], ink: str, title: str) -> Spec:
    across = {"orient": "top", "labelAngle": -45, "domain": False}
    down = {"labelLimit": 220, "domain": False, "ticks": False}
    text = {
        "x": {"field": "column", "type": "nominal", "sort": columns, "title": None, "axis": across},
        "y": {"field": "name", "type": "nominal", "sort": names, "title": None, "axis": down},
        "text": ref("text"),
    }
    height = 24 * len({row["name"] for row in rows})
    layers = [layer(rows, {"type": "text", "fontSize": 12, "color": ink}, text)]
    return chart(layers, width=56 * len(columns), height=height, title=title)
