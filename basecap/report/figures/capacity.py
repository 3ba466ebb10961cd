"""The figure of how much is recalled: accuracy against one axis of the grid, a line per value of the other."""

from itertools import cycle, islice

from basecap.analysis.results import TaskResults
from basecap.analysis.tasks.recall_rows import AccuracyRow
from basecap.report.figures.cells import axes_of, title_of
from basecap.report.figures.spec import Spec, chart, layer, number
from basecap.report.figures.style import PERCENT, SHARE, ref, tooltip
from basecap.report.palette import DARK_GREY, SHAPES
from basecap.report.published import published_numbers


def capacity(study: TaskResults, row: AccuracyRow, axis: str) -> Spec | None:
    """Accuracy of one row of `tests` against `axis`, a line per value of the other axis, intervals as thin lines.

    Published numbers of single cells are open diamonds. None where the cells do not vary over `axis`, or vary over
    more than one other, or there is neither a line of two places nor a published number.
    """
    axes = axes_of(study)
    if axis not in axes or len(axes) > 2 or not all(set(axes) <= set(cell.axis) for cell in row.cells):
        return None
    others = [name for name in axes if name != axis]
    rows = [{**_place(cell.axis, axis, others), **vars(cell.accuracy), "examples": cell.examples} for cell in row.cells]
    numbers = published_numbers(study)
    published = [
        {**_place(found.axis, axis, others), "value": found.published}
        for found in (numbers.rows if numbers else ())
        if found.published is not None
        and set(axes) <= set(found.axis)
        and (found.architecture, found.train, found.test) == (row.architecture, row.train, row.test)
    ]
    if not published and len({found["line"] for found in rows}) == len(rows):
        return None
    places = sorted({found["place"] for found in [*rows, *published]})
    lines = sorted({found["line"] for found in rows})
    shown = [
        {"field": field, "type": "quantitative", "title": name}
        for field, name in zip(("place", "line"), (axis, *others), strict=False)
    ]
    scale = {"type": "log", "base": 2, "nice": False, "domain": [places[0] / 1.1, places[-1] * 1.1]}
    legend = {"title": others[0], "orient": "bottom", "columns": 8} if others else None
    by_line: Spec = {"field": "line", "type": "nominal", "legend": legend}
    look = {
        "x": number("place", axis, scale, {"values": places, "format": ",", "grid": False}),
        "color": {**by_line, "scale": {"domain": lines, "scheme": "viridis"}},
    }
    mark: Spec = {
        **look,
        "y": _y("value"),
        "shape": {
            **by_line,
            "scale": {"domain": lines, "range": [*islice(cycle(SHAPES), len(lines))]},
        },
        "tooltip": [*shown, *tooltip("value", "low", "high", "examples")],
    }
    layers = [
        layer(rows, {"type": "rule", "strokeWidth": 1, "opacity": 0.6}, {**look, "y": _y("low"), "y2": ref("high")}),
        layer(rows, {"type": "line", "strokeWidth": 1.5}, {**look, "y": _y("value")}),
        layer(rows, {"type": "point", "filled": True, "size": 45}, mark),
    ]
    if published:
        diamond = {"type": "point", "shape": "diamond", "size": 90, "strokeWidth": 1.5, "color": DARK_GREY}
        theirs = {"x": look["x"], "y": _y("value"), "tooltip": [*shown, *tooltip("value")]}
        layers.append(layer(published, diamond, theirs))
    return chart(layers, width=360, height=230, title=title_of(row))


def _place(place: dict[str, float], axis: str, others: list[str]) -> dict[str, float]:
    return {"place": place[axis], "line": place[others[0]] if others else 0}


def _y(field: str) -> Spec:
    return number(field, "accuracy", SHARE, PERCENT)
