"""What all figures share: names, colours, marks, tooltips, and how the trained range is shaded."""

import json
from collections.abc import Callable, Sequence

from basecap.analysis.results import StudyResults, TaskResults, TextResults
from basecap.report.figures.spec import Rows, Spec, layer
from basecap.report.palette import BLUE, DARK_GREY, REFERENCE_WIDTH, Look, looks

NATS = "nats per token"
#: The losses that may be the x axis of a scatter: attribute of a point -> title.
ABSCISSAE = {"held_out": "pre-training loss, held out", "training": "pre-training loss, smoothed"}


def compared_at(study: TextResults) -> str:
    """Return the loss of a point at which architectures are compared; a mixed study holds no domain back."""
    return "held_out" if study.ood_domains else "training"


def trained_range(study: TextResults) -> tuple[float, float] | None:
    """Return the range of pre-training loss over which gaps are means, from the lowest end of all rows."""
    ranges = [row.range for row in study.comparisons if row.range is not None]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def trained_band(study: TextResults, x: Callable[[str], Spec]) -> list[Spec]:
    """Shade the trained range across a chart with x axis `x(field)`, and name it; nothing where there is none."""
    found = trained_range(study)
    if found is None:
        return []
    rows = [{"low": found[0], "high": found[1], "label": "trained range"}]
    text = {"type": "text", "align": "left", "baseline": "top", "dx": 3, "dy": 3, "fontSize": 11, "color": DARK_GREY}
    return [
        layer(rows, {"type": "rect", "clip": True, "color": BLUE, "opacity": 0.09}, {"x": x("low"), "x2": ref("high")}),
        layer(rows, text, {"x": x("low"), "y": {"value": 0}, "text": ref("label")}),
    ]


def ref(field: str) -> Spec:
    """Return a channel that reads a field and has no scale of its own: the other end of a bar, or text."""
    return {"field": field}


def names_of(study: StudyResults) -> list[str]:
    """Return the architectures of a study, as charts and the legend name them."""
    return study.architectures if isinstance(study, TaskResults) else study.names


def drawn(study: StudyResults, rows: Rows) -> list[str]:
    """Return the names of rows in the order of the study."""
    found = {row["name"] for row in rows}
    return [name for name in names_of(study) if name in found]


def colour(study: StudyResults, rows: Rows) -> Spec:
    """Return the colour of each architecture, the same in every chart."""
    return _by_name(study, rows, [look.colour for look in _looks(study)])


def shape(study: StudyResults, rows: Rows) -> Spec:
    """Return the mark of each architecture."""
    return _by_name(study, rows, [look.mark for look in _looks(study)])


def dash(study: StudyResults, rows: Rows) -> Spec:
    """Return the dashes of each architecture's line."""
    return _by_name(study, rows, [list(look.dash) for look in _looks(study)])


def of_lines(channel: Spec) -> Spec:
    """Return the colour or the dashes of a chart of lines without marks, whose legend shows both."""
    line = {"symbolType": "stroke", "symbolStrokeWidth": 2.5, "symbolSize": 400}
    return channel | {"legend": channel["legend"] | line}


def reference_first(study: StudyResults, rows: Rows) -> Rows:
    """Return rows with those of the reference before the others, which are then drawn over it.

    Its line and marks are larger, so they are seen also where curves coincide.
    """
    return sorted(rows, key=lambda row: row["name"] != study.reference)


def stroke_width(study: StudyResults, others: float) -> Spec:
    """Return the width of lines in pixels: that of the reference, and `others`."""
    return _of_reference(study, REFERENCE_WIDTH, others)


def point_size(study: StudyResults, others: float) -> Spec:
    """Return the area of marks in square pixels: `others`, and a larger one of the reference."""
    return _of_reference(study, 2.5 * others, others)


def _of_reference(study: StudyResults, own: float, others: float) -> Spec:
    return {"condition": {"test": f"datum.name === {json.dumps(study.reference)}", "value": own}, "value": others}


def _looks(study: StudyResults) -> list[Look]:
    return looks(names_of(study), study.reference)


def _by_name(study: StudyResults, rows: Rows, values: Sequence[object]) -> Spec:
    legend = {"title": None, "orient": "bottom", "columns": 2, "symbolOpacity": 1, "values": drawn(study, rows)}
    scale = {"domain": names_of(study), "range": list(values)}
    return {"field": "name", "type": "nominal", "scale": scale, "legend": legend}


def size_of_points(rows: Rows) -> int:
    """Return the size of points, smaller where many would hide each other."""
    return 50 if len(rows) <= 150 else 25


def extent(values: Sequence[float]) -> list[float]:
    """Return the range of values with a margin, never empty."""
    margin = 0.06 * (max(values) - min(values)) or 0.1
    return [min(values) - margin, max(values) + margin]


#: Axis of a share, in percent.
PERCENT: Spec = {"format": ".0%", "tickCount": 5}
#: Scale of a share.
SHARE: Spec = {"domain": [0, 1], "nice": False}
#: A label that breaks long names behind hyphens, for axes that are narrow on a phone.
BROKEN = r"split(replace(datum.label, /-(?=[^-]{6})/g, '-\n'), '\n')"
#: Colour of a share in a heat map, from white to dark blue, and of a number printed over it; both of the field "value".
SHARE_COLOUR: Spec = {
    "field": "value",
    "type": "quantitative",
    "scale": {"domain": [0, 1], "scheme": "blues"},
    "legend": None,
}
SHARE_INK: Spec = {"condition": {"test": "datum.value > 0.55", "value": "white"}, "value": "black"}

#: Field of a row -> its name in tooltips, where that differs.
TITLES = {
    "name": "architecture",
    "train": "trained on",
    "test": "tested on",
    "tokens": "tokens trained on",
    "x": "pre-training loss",
    "stderr": "standard error",
    "alone": "interval, this row alone",
    "front": "on the Pareto front",
    "between": "lowest and highest run",
}
#: Fields that are text in tooltips, and formats of numbers that are not 1.2345.
TEXT = {
    "name",
    "run",
    "verdict",
    "subset",
    "train",
    "test",
    "region",
    "gap",
    "interval",
    "alone",
    "between",
    "front",
    "class",
    "part",
}
FORMATS = {"tokens": ",", "n": ",", "examples": ",", "seed": "d"}


def tooltip(*fields: str) -> list[Spec]:
    """Return the fields of a row that the pointer shows."""
    return [
        {"field": field, "type": "nominal", "title": TITLES.get(field, field)}
        if field in TEXT
        else {
            "field": field,
            "type": "quantitative",
            "title": TITLES.get(field, field),
            "format": FORMATS.get(field, ".4f"),
        }
        for field in fields
    ]
