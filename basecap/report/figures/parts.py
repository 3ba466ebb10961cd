"""The figure of where gaps come from: what each class of tokens contributes to them."""

from collections.abc import Iterable

from basecap.analysis.results import TextResults
from basecap.analysis.rows import Row
from basecap.records.token_classes import CLASSES
from basecap.report.figures.gaps import around_zero, zero
from basecap.report.figures.spec import Datum, Spec, category, chart, layer, number, unless_picked
from basecap.report.figures.style import NATS, extent, ref, tooltip
from basecap.report.palette import BLACK, BLUE, GOLD, GREY
from basecap.report.text_summary import gap_text, interval_text

#: Colours of the classes, in their order.
COLOURS = (BLUE, GOLD, GREY)


def parts(study: TextResults) -> Spec | None:
    """A bar per architecture, stacked from the parts of its gap: higher losses to the right, lower ones to the left.

    A dot marks the gap, their sum.
    """
    found = [row for row in study.comparisons if row.parts]
    if not found:
        return None
    rows = [piece for row in found for piece in _pieces(row)]
    gaps = [
        {"name": row.name, "value": row.gap.value, "gap": gap_text(row.gap), "interval": interval_text(row.gap)}
        for row in found
        if row.gap is not None
    ]
    low, high = extent([0.0, *(row[end] for row in rows for end in ("from", "to"))])
    y = category("name", [row.name for row in found], None, {"labelLimit": 150, "ticks": False, "domain": False})

    def x(field: str) -> Spec:
        encoding = number(field, f"part of the gap in {NATS}, positive: worse", **around_zero(low, high))
        return encoding | {"axis": encoding["axis"] | {"titleAnchor": "end"}}

    bar = {
        "y": y,
        "x": x("from"),
        "x2": ref("to"),
        "opacity": unless_picked(),
        "color": {
            "field": "class",
            "type": "nominal",
            "scale": {"domain": list(CLASSES), "range": list(COLOURS)},
            "legend": {"title": "tokens", "orient": "bottom", "values": list(CLASSES)},
        },
        "tooltip": tooltip("name", "class", "part", "interval"),
    }
    dot = {"type": "point", "shape": "diamond", "filled": True, "size": 90, "color": BLACK, "opacity": 1,
           "stroke": "#ffffff", "strokeWidth": 1}  # fmt: skip
    whole = {"y": y, "x": x("value"), "opacity": unless_picked(), "tooltip": tooltip("name", "gap", "interval")}
    layers = [
        layer(rows, {"type": "bar", "stroke": "white", "strokeWidth": 0.5}, bar),
        zero("x", x("at")),
        layer(gaps, dot, whole),
    ]
    return chart(layers, width=420, height=24 * len(found) + 12, title="where the gap comes from", pick=True)


def _pieces(row: Row) -> Iterable[Datum]:
    """Yield the pieces of a bar: parts above 0 stand one after the other to the right of 0, the others to the left."""
    ends = {True: 0.0, False: 0.0}
    for part in row.parts:
        side = part.value > 0
        yield {
            "name": row.name,
            "class": part.name,
            "from": ends[side],
            "to": ends[side] + part.value,
            "part": gap_text(part),
            "interval": interval_text(part),
        }
        ends[side] += part.value
