"""The figure of how much is recalled: accuracy against one axis of the grid, a line per value of the other."""

from typing import Any

import altair as alt

from basecap.report.figures.cells import axes_of, title_of
from basecap.report.figures.look import Chart, Study, chart_of, tooltip
from basecap.report.palette import DARK_GREY, SHAPES


def capacity(study: Study, found: dict[str, Any], axis: str) -> Chart | None:
    """Accuracy of one row of `tests` against `axis`, a line per value of the other axis, intervals as thin lines.

    Published numbers of single cells are open diamonds. None where the cells do not vary over `axis`, or vary over
    more than one other.
    """
    axes = axes_of(study)
    if axis not in axes or len(axes) > 2 or not all(set(axes) <= set(cell["axis"]) for cell in found["cells"]):
        return None
    others = [name for name in axes if name != axis]
    rows = [_place(cell["axis"], axis, others) | cell["accuracy"] | {"n": cell["examples"]} for cell in found["cells"]]
    published = [
        _place(row["axis"], axis, others) | {"value": row["published"]}
        for row in (study["published"] or {"rows": []})["rows"]
        if set(axes) <= set(row["axis"]) and all(row[key] == found[key] for key in ("architecture", "train", "test"))
    ]
    places = sorted({row["place"] for row in [*rows, *published]})
    lines = sorted({row["line"] for row in rows})
    scale = alt.Scale(type="log", base=2, nice=False, domain=[places[0] / 1.1, places[-1] * 1.1])
    x = alt.X("place:Q", title=axis, scale=scale, axis=alt.Axis(values=places, format="~s", grid=False))
    legend = alt.Legend(title=others[0], orient="bottom", columns=8) if others else None
    colour = alt.Color("line:O", scale=alt.Scale(domain=lines, scheme="viridis"), legend=legend)
    shown = [
        alt.Tooltip(f"{field}:Q", title=name) for field, name in zip(("place", "line"), (axis, *others), strict=False)
    ]
    base = chart_of(rows).encode(x=x, color=colour)
    marks = base.mark_point(filled=True, size=45).encode(
        y=_y("value"),
        shape=alt.Shape("line:N", scale=alt.Scale(domain=lines, range=_shapes(len(lines))), legend=legend),
        tooltip=[*shown, *tooltip("value", "low", "high", "n")],
    )
    layers: list[alt.Chart] = [
        base.mark_rule(strokeWidth=1, opacity=0.6, tooltip=None).encode(y=_y("low"), y2="high:Q"),
        base.mark_line(strokeWidth=1.5).encode(y=_y("value")),
        marks,
    ]
    if published:
        theirs = chart_of(published).mark_point(shape="diamond", size=90, strokeWidth=1.5, color=DARK_GREY)
        layers.append(theirs.encode(x=x, y=_y("value"), tooltip=[*shown, *tooltip("value")]))
    return alt.layer(*layers).properties(width=360, height=230, title=title_of(found))


def _place(place: dict[str, float], axis: str, others: list[str]) -> dict[str, float]:
    return {"place": place[axis], "line": place[others[0]] if others else 0}


def _y(field: str) -> alt.Y:
    scale = alt.Scale(domain=[0, 1], nice=False)
    return alt.Y(f"{field}:Q", title="accuracy", scale=scale, axis=alt.Axis(format=".0%", tickCount=5))


def _shapes(count: int) -> list[str]:
    return [SHAPES[index % len(SHAPES)] for index in range(count)]
