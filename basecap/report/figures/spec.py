"""Vega-Lite descriptions of charts, which are JSON: a chart is a stack of layers, each with rows of data."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from basecap.report.palette import BLACK, GREY

#: A Vega-Lite description, or a part of one.
Spec = dict[str, Any]
#: A row of data in a description, by field.
Datum = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]

#: The version of Vega-Lite that draws.
VEGA_LITE = "6.4"
#: The look that all charts share.
CONFIG: Spec = {
    "font": "Helvetica, Arial, sans-serif",
    "background": "#ffffff",
    "view": {"stroke": "#dddddd"},
    "axis": {
        "labelFontSize": 12,
        "titleFontSize": 13,
        "titleFontWeight": "normal",
        "labelColor": BLACK,
        "titleColor": BLACK,
        "gridColor": "#eeeeee",
        "domainColor": GREY,
        "tickColor": GREY,
        "labelSeparation": 6,
    },
    "legend": {"labelFontSize": 12, "labelLimit": 185, "labelColor": BLACK},
    "title": {"fontSize": 14, "anchor": "start", "color": BLACK, "subtitleColor": BLACK},
}


def published_title(source: str) -> Spec:
    """Return the title of a chart of published numbers."""
    return titled("published", source)


def titled(title: str, source: str) -> Spec:
    """Return a title with where the numbers come from under it, in lines that fit on a phone."""
    return {"text": title, "subtitle": textwrap.wrap(source, 44)}


def layer(rows: Rows, mark: Spec, encoding: Spec, where: str | None = None) -> Spec:
    """Return a layer: a mark for rows, of those for which the expression `where` holds."""
    kept = {} if where is None else {"transform": [{"filter": where}]}
    return {"data": rows, **kept, "mark": mark, "encoding": encoding}


def chart(
    layers: Sequence[Spec],
    *,
    width: int,
    height: int,
    title: str | Spec | None,
    pick: bool = False,
    stretches: bool = True,
) -> Spec:
    """Return the description of a chart whose layers share their scales.

    Args:
        layers: from the back to the front.
        width, height: of the area between its axes, in pixels.
        title: of the chart.
        pick: whether the legend of the page picks what it shows.
        stretches: whether it becomes as wide as its place in the page.
    """
    datasets: dict[str, list[Mapping[str, Any]]] = {}
    names: dict[int, str] = {}
    drawn = []
    for part in layers:  # rows that several layers share are stored once
        name = names.setdefault(id(part["data"]), f"data-{len(names)}")
        datasets[name] = list(part["data"])
        drawn.append(part | {"data": {"name": name}})
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE}.json",
        "config": CONFIG,
        **({} if stretches else {"usermeta": {"stretches": False}}),
        **({} if title is None else {"title": title}),
        "width": width,
        "height": height,
        **({"params": [{"name": PICKED, "value": []}]} if pick else {}),
        "datasets": datasets,
        "layer": drawn,
    }


#: The names that are picked in the page's legend, none for all: a parameter of charts.
PICKED = "picked"
#: Whether a row is drawn in full.
IS_PICKED = f"{PICKED}.length == 0 || indexof({PICKED}, datum.name) >= 0"


def unless_picked(full: float = 1.0, faded: float = 0.08) -> Spec:
    """Return an opacity that fades rows that are not picked."""
    return {"condition": {"test": IS_PICKED, "value": full}, "value": faded}


def number(field: str, title: str, scale: Spec | None = None, axis: Spec | None = None) -> Spec:
    """Return the encoding of a number as a position."""
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        **({} if scale is None else {"scale": scale}),
        **({} if axis is None else {"axis": axis}),
    }


def category(field: str, values: Sequence[Any], title: str | None, axis: Spec | None = None) -> Spec:
    """Return the encoding of one of `values` as a position, side by side in their order."""
    return {
        "field": field,
        "type": "ordinal",
        "sort": list(values),
        "title": title,
        "scale": {"domain": list(values)},
        **({} if axis is None else {"axis": axis}),
    }
