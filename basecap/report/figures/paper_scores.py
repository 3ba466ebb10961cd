"""A table of scores, a row per architecture: figure 2c and the tables of the first paper (arXiv 2505.18522)."""

from statistics import median

import altair as alt

from basecap.report.figures.look import Chart, Rows, Study, chart_of, names_of
from basecap.report.palette import BLACK, DARK_GREY

#: The column that training itself measures: tokens per second relative to the reference.
SPEED = "training speed"


def scores(study: Study) -> tuple[Chart | None, Chart | None]:
    """Return the columns that are measured here, and the published table."""
    figure = study["settings"]["figure"]
    columns = [SPEED] if SPEED in figure["columns"] else []
    ours = [{"name": name, "column": SPEED, "text": f"{value:.2f}"} for name, value in _speeds(study).items()]
    measured = _table(ours, columns, names_of(study), BLACK) if columns and ours else None
    published = figure.get("published")
    if published is None:
        return measured and measured.properties(title="measured here"), None
    theirs = [
        {"name": name, "column": column, "text": "–" if value is None else f"{value:.2f}"}
        for name in names_of(study)
        for column, value in zip(figure["columns"], published["values"].get(name, ()), strict=False)
    ]
    table = _table(theirs, figure["columns"], names_of(study), DARK_GREY)
    title = f"published: {published['source']}"
    return measured and measured.properties(title="measured here"), table.properties(title=title)


def _speeds(study: Study) -> dict[str, float]:
    """Return by architecture the median of its runs' tokens per second, relative to the reference's."""
    rates: dict[str, list[float]] = {}
    for run in study["runs"]:
        if run["status"] == "finished" and run["tokens_per_s"]:
            rates.setdefault(run["name"], []).append(run["tokens_per_s"])
    base = rates.get(study["reference"])
    return {name: median(found) / median(base) for name, found in rates.items()} if base else {}


def _table(rows: Rows, columns: list[str], names: list[str], ink: str) -> Chart:
    text = (
        chart_of(rows)
        .mark_text(fontSize=12, color=ink)
        .encode(
            x=alt.X("column:N", sort=columns, title=None, axis=alt.Axis(orient="top", labelAngle=-45, domain=False)),
            y=alt.Y("name:N", sort=names, title=None, axis=alt.Axis(labelLimit=220, domain=False, ticks=False)),
            text="text:N",
        )
    )
    return alt.layer(text).properties(width=56 * len(columns), height=24 * len({row["name"] for row in rows}))
