"""The figure of a declared evaluation."""

from basecap.analysis.results import AnswerRow, EvaluationResults, EvaluationRow, StudyResults, TaskResults
from basecap.report.figures.spec import Datum, Rows, Spec, chart, layer, number, unless_picked
from basecap.report.figures.style import (
    colour,
    names_of,
    point_size,
    ref,
    reference_first,
    shape,
    stroke_width,
    tooltip,
)

#: Where a value need not be compared with zero.
FREE: Spec = {"zero": False}
#: Few enough labels for a phone.
FEW: Spec = {"tickCount": 6}
#: Places on an axis from which on ticks stand at round numbers instead.
MANY = 13


def evaluation(study: StudyResults, found: EvaluationResults, metric: str, subset: str | None) -> Spec:
    """A declared evaluation: curves over its first axis, one for each value of its second, else a mark per subset.

    Bars are standard errors, of shares of answers intervals.
    """
    # In a study of text a run is named after its architecture.
    architectures = {own.name: own.architecture for own in study.points} if isinstance(study, TaskResults) else {}
    chosen = (row for row in found.rows if row.metric == metric and subset in (None, row.subset))
    rows = reference_first(study, [_row(row, found.axes, architectures) for row in chosen if row.value is not None])
    unit, better = found.kind_of(metric)
    title = f"{metric} ({unit}{'' if better == 'neither' else f'; {better} is better'})"
    axes = [f"axis{index}" for index in range(len(found.axes))]
    named = [
        {"field": field, "type": "quantitative", "title": axis} for field, axis in zip(axes, found.axes, strict=True)
    ]
    look = {
        "color": colour(study, rows),
        "opacity": unless_picked(),
        "detail": [{"field": field, "type": "nominal"} for field in ("seed", "run")],
    }
    shown = [*tooltip("run" if architectures else "name", "seed", "subset"), *named, *tooltip("value", "stderr", "n")]
    mark = {"shape": shape(study, rows), "size": point_size(study, 55), "tooltip": shown}
    dot = {"type": "point", "filled": True}
    if not found.axes:
        look |= _rows_of_subsets(study, rows)
        layers = [
            layer(rows, {"type": "rule"}, {**look, "x": number("low", title, FREE, FEW), "x2": ref("high")}),
            layer(rows, dot, {**look, **mark, "x": number("value", title, FREE, FEW)}),
        ]
        height = 14 * len({(row["run"], row["subset"]) for row in rows}) + 20
        return chart(layers, width=480, height=height, title=found.name, pick=True)
    places = [row[axes[0]] for row in rows]
    look["x"] = number(axes[0], found.axes[0], _scale(places), _ticks(places))
    if len(axes) > 1:
        look["strokeDash"] = {"field": axes[1], "type": "nominal", "legend": {"title": found.axes[1]}}
    y = number("value", title, FREE)
    layers = [
        layer(rows, {"type": "line"}, {**look, "y": y, "strokeWidth": stroke_width(study, 1.5)}),
        layer(rows, {"type": "rule"}, {**look, "y": number("low", title, FREE), "y2": ref("high")}),
        layer(rows, dot, {**look, **mark, "y": y}),
    ]
    name = f"{found.name}, {subset}" if subset else found.name
    return chart(layers, width=480, height=300, title=name, pick=True)


def _scale(values: list[float]) -> Spec:
    """Return the scale of an axis: logarithmic where values span four doublings, as lengths and positions do."""
    wide = bool(values) and min(values) > 0 and max(values) >= 16 * min(values)
    return {"type": "log", "base": 2, "nice": False} if wide else FREE


def _ticks(values: list[float]) -> Spec:
    """Return an axis with a tick at each value, unless they are many: one between two layers would mean nothing."""
    ticks = sorted({*values})
    whole = {"format": ",d", "tickMinStep": 1} if all(value == int(value) for value in ticks) else {}
    return whole if len(ticks) > MANY else whole | {"values": ticks}


def _row(row: EvaluationRow, axes: list[str], architectures: dict[str, str]) -> Datum:
    """Return the data of one number; an axis has a field by its place, as its name may mean something in Vega."""
    value, error = row.value or 0.0, row.stderr or 0.0
    low, high = (row.low, row.high) if isinstance(row, AnswerRow) else (value - error, value + error)
    return {
        "name": architectures.get(row.name, row.name),
        "run": row.name,
        "seed": row.seed,
        "subset": row.subset,
        "value": row.value,
        "stderr": row.stderr,
        "n": row.n,
        "low": low,
        "high": high,
        **{f"axis{index}": row.axis[axis] for index, axis in enumerate(axes)},
    }


def _rows_of_subsets(study: StudyResults, rows: Rows) -> Spec:
    """Return positions: a group per subset, in it a line per architecture in the order of the study."""
    order = [*names_of(study), *study.names]
    runs = sorted({row["run"] for row in rows}, key=order.index)
    return {
        "y": {
            "field": "subset",
            "type": "nominal",
            "sort": list(dict.fromkeys(row["subset"] for row in rows)),
            "title": None,
            "axis": {"labelLimit": 220},
            "scale": {"paddingInner": 0.3},
        },
        "yOffset": {"field": "run", "type": "nominal", "sort": None, "scale": {"domain": runs}},
    }
