"""The figures that help to choose: the gap of every architecture against what it costs, and against its scores."""

from collections.abc import Sequence
from math import exp, log

from basecap.analysis.correlations import Measure
from basecap.analysis.joined import Joined
from basecap.analysis.rows import Estimate
from basecap.report.figures.labels import Spot, named
from basecap.report.figures.spec import Datum, Spec, chart, layer, number, titled, unless_picked
from basecap.report.figures.style import NATS, extent, ref, tooltip
from basecap.report.palette import GREY, Look, looks
from basecap.report.text_summary import gap_text, interval_text

#: Height of a chart, and the margin beside its first and last point, in the range of its points.
HEIGHT, MARGIN = 260, 0.1


def gap_against(joined: Joined, gap: Measure, other: Measure) -> Spec | None:
    """The gap with its interval against a cost or a score; None with nothing to compare.

    The Pareto front of a cost is a line.
    """
    costs = other.kind == "cost"
    if not (names := compared(gap, other)):
        return None
    front = pareto_front(gap, other) if costs else []
    rows = [_row(name, gap.values[name], other.values[name].value, name in front) for name in names]
    found = [look for look in looks_of(joined) if look.name in names]
    domain = [look.name for look in found]

    def look(values: list[str]) -> Spec:
        legend = {"title": None, "orient": "bottom", "columns": 2, "symbolOpacity": 1}
        return {"field": "name", "type": "nominal", "scale": {"domain": domain, "range": values}, "legend": legend}

    across = _across([row["x"] for row in rows], costs)
    upwards = extent([end for row in rows for end in (row["low"], row["y"], row["high"]) if end is not None])
    x = _abscissa(other, across)

    def y(field: str) -> Spec:
        return number(field, f"gap in {NATS}, positive: worse", {"domain": upwards, "nice": False})

    shared = {"x": x, "color": look([each.colour for each in found]), "opacity": unless_picked()}
    dot = {**shared, "y": y("y"), "shape": look([each.mark for each in found]),
           "tooltip": [*tooltip("name", "gap", "interval", *(["front"] if costs else [])), _number(other)]}  # fmt: skip
    line = {"type": "line", "color": GREY, "strokeDash": [4, 3], "strokeWidth": 1.5}
    bar = {**shared, "y": y("low"), "y2": ref("high")}
    spots = {row["name"]: _spot(row, across, upwards, costs) for row in rows}
    layers = [
        *([layer(rows, line, {"x": x, "y": y("y")}, "datum.front == 'yes'")] if front else []),
        layer(rows, {"type": "rule", "strokeWidth": 1.5}, bar, "isValid(datum.low)"),
        layer(rows, {"type": "point", "filled": True, "size": 90}, dot),
        *named(rows, list(spots.values()), [spots[name] for name in front], x, y("y"), HEIGHT),
    ]
    heading = titled(f"gap against {other.name}", other.source)
    return chart(layers, width=420, height=HEIGHT, title=heading, pick=True)


def compared(gap: Measure, other: Measure) -> list[str]:
    """Return the architectures in a chart, none where all have the same cost or score, or there is only one.

    The axis of a cost is logarithmic, so what costs nothing is not drawn.
    """
    drawn = [name for name in gap.values if name in other.values]
    if other.kind == "cost":
        drawn = [name for name in drawn if other.values[name].value > 0]
    return drawn if len({other.values[name].value for name in drawn}) > 1 else []


def _row(name: str, gap: Estimate, value: float, first: bool) -> Datum:
    """Return the data of an architecture whose cost or score is `value`, and whether it is on the Pareto front."""
    return {
        "name": name,
        "x": value,
        "y": gap.value,
        "low": gap.low,
        "high": gap.high,
        "gap": gap_text(gap),
        "interval": interval_text(gap),
        "front": "yes" if first else "no",
    }


def _across(values: Sequence[float], logarithmic: bool) -> list[float]:
    """Return the range of costs or scores to draw, with room for marks and names at its ends."""
    ends = [log(value) for value in (min(values), max(values))] if logarithmic else [min(values), max(values)]
    margin = MARGIN * (ends[1] - ends[0]) or 0.1
    wide = [ends[0] - margin, ends[1] + margin]
    return [exp(end) for end in wide] if logarithmic else wide


def _spot(row: Datum, across: Sequence[float], upwards: Sequence[float], logarithmic: bool) -> Spot:
    """Return where a row is drawn."""
    ends, x = [log(end) for end in across] if logarithmic else across, row["x"]
    top, y, bottom = (
        (upwards[1] - (row["y"] if value is None else value)) / (upwards[1] - upwards[0])
        for value in (row["high"], row["y"], row["low"])
    )
    share = ((log(x) if logarithmic else x) - ends[0]) / (ends[1] - ends[0])
    return Spot(name=row["name"], x=share, y=y, top=top, bottom=bottom)


def looks_of(joined: Joined) -> list[Look]:
    """Return the look of each architecture in the charts of a join."""
    return looks(joined.names, joined.reference or joined.names[0])


def pareto_front(gap: Measure, cost: Measure) -> list[str]:
    """Return the architectures that are not dominated in gap and cost, cheapest first.

    An architecture is dominated if another one is at least as good in both and better in one.
    """
    sign = -1 if cost.better == "higher" else 1
    points = {name: (sign * cost.values[name].value, gap.values[name].value)
              for name in gap.values if name in cost.values}  # fmt: skip
    front = [
        name
        for name, (price, loss) in points.items()
        if not any(other != (price, loss) and other[0] <= price and other[1] <= loss for other in points.values())
    ]
    return sorted(front, key=lambda name: points[name])


def _abscissa(other: Measure, domain: list[float]) -> Spec:
    costs = other.kind == "cost"
    better = "" if other.better == "neither" else f" ({other.better} is better)"
    scale = {"domain": domain, "nice": False, **({"type": "log"} if costs else {"zero": False})}
    axis = {"format": ".3~s" if costs else "~g", "tickCount": 4, "grid": False}
    return number("x", f"{other.name}, {other.unit}{better}", scale, axis)


def _number(other: Measure) -> Spec:
    form = ",.0f" if other.kind == "cost" else ".3~f"
    return {"field": "x", "type": "quantitative", "title": f"{other.name}, {other.unit}", "format": form}
