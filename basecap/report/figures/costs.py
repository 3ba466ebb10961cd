"""The figures that help to choose: the gap of every architecture against what it costs, and against its scores."""

from basecap.analysis.correlations import Measure
from basecap.analysis.joined import Joined
from basecap.report.figures.spec import Spec, chart, layer, number, titled, unless_picked
from basecap.report.figures.style import NATS, ref, tooltip
from basecap.report.palette import GREY, Look, looks
from basecap.report.text_summary import gap_text, interval_text


def gap_against(joined: Joined, gap: Measure, other: Measure) -> Spec | None:
    """The gap with its interval against a cost or a score. None below two architectures.

    The Pareto front of a cost is a line. The axis of a cost is logarithmic, so what costs nothing is not drawn.
    """
    costs = other.kind == "cost"
    names = [name for name in gap.values if name in other.values and (other.values[name].value > 0 or not costs)]
    if len(names) < 2:
        return None
    front = pareto_front(gap, other) if costs else []
    rows = [
        {
            "name": name,
            "x": other.values[name].value,
            "y": gap.values[name].value,
            "low": gap.values[name].low,
            "high": gap.values[name].high,
            "gap": gap_text(gap.values[name]),
            "interval": interval_text(gap.values[name]),
            "front": "yes" if name in front else "no",
        }
        for name in names
    ]
    found = [look for look in looks_of(joined) if look.name in names]
    domain = [look.name for look in found]

    def look(values: list[str]) -> Spec:
        legend = {"title": None, "orient": "bottom", "columns": 2, "symbolOpacity": 1}
        return {"field": "name", "type": "nominal", "scale": {"domain": domain, "range": values}, "legend": legend}

    x, title = _abscissa(other), f"gap in {NATS}, positive: worse"
    y = number("y", title)
    shared = {"x": x, "color": look([each.colour for each in found]), "opacity": unless_picked()}
    dot = {**shared, "y": y, "shape": look([each.mark for each in found]),
           "tooltip": [*tooltip("name", "gap", "interval", *(["front"] if costs else [])), _number(other)]}  # fmt: skip
    line = {"type": "line", "color": GREY, "strokeDash": [4, 3], "strokeWidth": 1.5}
    layers = [
        *([layer(rows, line, {"x": x, "y": y}, "datum.front == 'yes'")] if front else []),
        layer(rows, {"type": "rule", "strokeWidth": 1.5}, {**shared, "y": number("low", title), "y2": ref("high")},
              "isValid(datum.low)"),
        layer(rows, {"type": "point", "filled": True, "size": 90}, dot),
    ]  # fmt: skip
    heading = titled(f"gap against {other.name}", other.source)
    return chart(layers, width=420, height=300, title=heading, pick=True)


def looks_of(joined: Joined) -> list[Look]:
    """Return the look of each architecture in the charts of a join."""
    return looks(joined.names, joined.reference or joined.names[0])


def pareto_front(gap: Measure, cost: Measure) -> list[str]:
    """Return the architectures than which no other is at least as good in both and better in one, cheapest first."""
    sign = -1 if cost.better == "higher" else 1
    points = {name: (sign * cost.values[name].value, gap.values[name].value)
              for name in gap.values if name in cost.values}  # fmt: skip
    front = [
        name
        for name, (price, loss) in points.items()
        if not any(other != (price, loss) and other[0] <= price and other[1] <= loss for other in points.values())
    ]
    return sorted(front, key=lambda name: points[name])


def _abscissa(other: Measure) -> Spec:
    costs = other.kind == "cost"
    better = {"higher": " (more is better)", "lower": " (less is better)", "neither": ""}[other.better]
    scale = {"type": "log", "nice": False, "padding": 30} if costs else {"zero": False, "padding": 30}
    axis = {"format": ".3~s" if costs else "~g", "tickCount": 4, "grid": False}
    return number("x", f"{other.name}, {other.unit}{better}", scale, axis)


def _number(other: Measure) -> Spec:
    form = ",.0f" if other.kind == "cost" else ".3~f"
    return {"field": "x", "type": "quantitative", "title": f"{other.name}, {other.unit}", "format": form}
