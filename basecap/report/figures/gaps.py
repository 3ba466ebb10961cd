"""The figures of gaps: every gap with its interval, and the gap along the whole range of losses."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log, log10
from statistics import median
from typing import Literal

from basecap.analysis.results import TextResults
from basecap.analysis.rows import Estimate, Gap, GapCurve, Row
from basecap.report.figures.spec import PICKED, Datum, Rows, Spec, chart, layer, number, unless_picked
from basecap.report.figures.style import (
    ABSCISSAE,
    NATS,
    colour,
    compared_at,
    dash,
    extent,
    of_lines,
    ref,
    shape,
    tooltip,
    trained_band,
)
from basecap.report.palette import DARK_GREY, GOLD
from basecap.report.text_summary import gap_text, interval_text

#: What a gap is drawn over: losses, or the tokens after which the reference has them.
Axis = Literal["loss", "tokens"]
#: Bands of more architectures than this hide each other.
FEW = 3


def forest(study: TextResults, domain: str | None = None) -> Spec | None:
    """Every gap with its intervals and the tolerance, on one domain or over all; arrowheads where a bar goes on.

    Thin: the interval that holds for all rows together. Thick: the one that holds for the row alone.
    """
    found = [(row.name, gap) for row in study.comparisons if (gap := _gap_on(row, domain)) is not None]
    if not found:
        return None
    low, high = _forest_window([gap for _, gap in found])
    rows = [_bar(name, gap, low, high) for name, gap in found]
    names = [name for name, _ in found]

    def x(field: str) -> Spec:
        found = number(field, f"gap in {NATS}, positive: worse", **around_zero(low, high))
        # From the right: on a phone it is longer than the axis and goes on under the names.
        return found | {"axis": found["axis"] | {"titleAnchor": "end"}}

    look = {
        "y": {
            "field": "name",
            "type": "nominal",
            "sort": names,
            "title": None,
            "axis": {"labelLimit": 150, "ticks": False, "domain": False},
        },
        "color": colour(study, rows) | {"legend": None},
        "opacity": unless_picked(),
        "tooltip": tooltip("name", "gap", "interval", "alone", "verdict", "tolerance"),
    }
    layers = [zero("x", x("at"))]
    if study.ood_domains:
        mark = {"type": "tick", "thickness": 2, "size": 20}
        grey = {"color": {"value": DARK_GREY}}
        layers.append(layer(rows, mark, {**look, **grey, "x": x("tolerance")}, "isValid(datum.tolerance)"))
    for begin, end, width in (("from", "to", 2.0), ("alone_from", "alone_to", 4.5)):
        layers.append(layer(rows, {"type": "rule", "strokeWidth": width}, {**look, "x": x(begin), "x2": ref(end)}))
    for end, cut, shape_name, inwards in (
        ("from", "datum.low < datum.from", "triangle-left", 5),
        ("to", "datum.high > datum.to", "triangle-right", -5),
    ):
        mark = {"type": "point", "shape": shape_name, "filled": True, "size": 110, "opacity": 1, "xOffset": inwards}
        layers.append(layer(rows, mark, {**look, "x": x(end)}, cut))
    dot = {"type": "point", "filled": True, "size": 130, "opacity": 1, "stroke": "#ffffff", "strokeWidth": 1}
    layers.append(layer(rows, dot, {**look, "x": x("value"), "shape": shape(study, rows) | {"legend": None}}))
    title = domain or f"all {'unseen ' if study.ood_domains else ''}domains"
    return chart(layers, width=420, height=24 * len(rows) + 12, title=title, pick=True)


def _gap_on(row: Row, domain: str | None) -> Gap | None:
    """Return the gap of a row on a domain, that over all where None."""
    return row.gap if domain is None else next((part for part in row.domains if part.domain == domain), None)


def _bar(name: str, gap: Gap, low: float, high: float) -> Datum:
    """Return the data of one gap; bars are cut to the range from low to high."""
    return {
        "name": name,
        "value": gap.value,
        "low": gap.low,
        "high": gap.high,
        "from": _clip(gap.low, low, high),
        "to": _clip(gap.high, low, high),
        "alone_from": _clip(gap.single.low, low, high),
        "alone_to": _clip(gap.single.high, low, high),
        "tolerance": gap.tolerance,
        "verdict": gap.verdict,
        "gap": gap_text(gap),
        "interval": interval_text(gap),
        "alone": interval_text(gap.single),
    }


def gap_curve(study: TextResults, axis: Axis = "loss") -> Spec | None:
    """The gap along training, thick over each row's trained range, with its interval at each place.

    Over the whole range of losses that both have reached, or the tokens after which the reference has these losses.
    Bands of many architectures hide the lines and each other: then only those picked in the page's legend are drawn.
    """
    rows = [point for row in study.comparisons for point in _places(row)]
    if not rows:
        return None
    few = len({row["name"] for row in rows}) <= FEW
    shown = [0.0, *(row["value"] for row in rows)]
    ends = [row[end] for row in rows for end in ("low", "high") if row[end] is not None]
    window = _window(shown, ends, limit=(3 if few else 1) * max(map(abs, shown)))
    x = _abscissa(study, axis, [row[axis] for row in rows])

    def y(field: str) -> Spec:
        return number(field, f"gap to {study.reference} ({NATS})", **around_zero(*window))

    look = {"x": x(axis), "color": of_lines(colour(study, rows))}
    first = f"{PICKED}.length == 0 || " if few else ""
    shade = {"condition": {"test": f"{first}indexof({PICKED}, datum.name) >= 0", "value": 0.15}, "value": 0}
    line = {**look, "y": y("value"), "opacity": unless_picked(), "strokeDash": of_lines(dash(study, rows))}
    trained = trained_band(study, x) if axis == "loss" else []
    layers = [*_transition(study, rows, axis, x), *trained, zero("y", y("at"))]
    if ends:
        band = {**look, "y": y("low"), "y2": ref("high"), "opacity": shade}
        layers.append(layer(rows, {"type": "area", "clip": True}, band, "isValid(datum.low)"))
    # A line answers the pointer with its first place only; points that cannot be seen answer with theirs.
    point = {"type": "point", "filled": True, "size": 60, "opacity": 0, "aria": False}
    told = tooltip("name", "loss", "tokens", "gap", "interval")
    layers += [
        layer(rows, {"type": "line", "strokeWidth": 1.2}, line),
        layer(rows, {"type": "line", "strokeWidth": 3.5}, line, "datum.trained"),
        layer(rows, point, {**look, "y": y("value"), "tooltip": told}),
    ]
    title = "along training" if axis == "loss" else "over tokens"
    return chart(layers, width=480, height=300, title=title, pick=True)


def _abscissa(study: TextResults, axis: Axis, values: Sequence[float]) -> Callable[[str], Spec]:
    """Return the x axis that reads a field, for a range of `values`."""
    if axis == "tokens":
        span: Spec = {"domain": [min(values), max(values)], "nice": False, "type": "log"}
        title = f"tokens after which {study.reference} has that loss"
        ticks: Spec = {"tickCount": 6, "format": "~s", "labelFlush": 12}
    else:
        span = {"domain": extent(values), "nice": False, "zero": False}
        title, ticks = f"{ABSCISSAE[compared_at(study)]} ({NATS})", {"tickCount": 8}
    return lambda field: number(field, title, span, ticks)


def _transition(study: TextResults, rows: Rows, axis: Axis, x: Callable[[str], Spec]) -> list[Spec]:
    """Shade where the reference learns to copy, from the start of its transition to its end, or to the last place."""
    if study.maturity is None or study.maturity.started is None:
        return []
    places = sorted((row["tokens"], row["loss"]) for row in rows)
    begin, end = study.maturity.started, study.maturity.passed or places[-1][0]
    begin, end = (min(max(tokens, places[0][0]), places[-1][0]) for tokens in (begin, end))
    if begin >= end:
        return []
    found = [begin, end] if axis == "tokens" else [_loss_after(tokens, places) for tokens in (begin, end)]
    band = [{"low": found[0], "high": found[1], "label": f"{study.reference} learns to copy"}]
    text = {
        "type": "text",
        "align": "left",
        "baseline": "bottom",
        "dx": 3,
        "dy": -3,
        "fontSize": 11,
        "color": DARK_GREY,
    }
    shade = {"type": "rect", "clip": True, "color": GOLD, "opacity": 0.18}
    left = "low" if axis == "tokens" else "high"  # losses fall
    return [
        layer(band, shade, {"x": x("low"), "x2": ref("high")}),
        layer(band, text, {"x": x(left), "y": {"value": {"expr": "height"}}, "text": ref("label")}),
    ]


def _loss_after(tokens: float, places: Sequence[tuple[float, float]]) -> float:
    """Return the loss of the reference after so many tokens, between places [(tokens, loss)] in their order."""
    after = next(index for index, (count, _) in enumerate(places) if count >= tokens)
    (before, high), (count, low) = places[max(0, after - 1)], places[after]
    return low if count == before else high + (low - high) * log(tokens / before) / log(count / before)


def _places(row: Row) -> Iterable[Datum]:
    """Yield the data of a row's gap at each place; the ends of its interval are None in a study without intervals."""
    if row.along is None or row.range is None:
        return
    for loss, tokens, estimate in zip(row.along.loss, row.along.tokens, _estimates(row.along), strict=True):
        yield {
            "name": row.name,
            "loss": loss,
            "tokens": tokens,
            "trained": row.range[0] <= loss <= row.range[1],
            **vars(estimate),
            "gap": gap_text(estimate),
            "interval": interval_text(estimate),
        }


def _estimates(found: GapCurve) -> list[Estimate]:
    missing = [None] * len(found.loss)
    ends = zip(found.value, found.low or missing, found.high or missing, strict=True)
    return [Estimate(value=value, low=low, high=high) for value, low, high in ends]


def zero(channel: str, position: Spec) -> Spec:
    """Mark no gap by a line across a position, which reads the field "at"."""
    return layer([{"at": 0.0}], {"type": "rule", "strokeWidth": 1.5, "color": DARK_GREY}, {channel: position})


def _forest_window(gaps: Sequence[Gap]) -> tuple[float, float]:
    """Return the range of gaps to draw: one wide interval must not shrink all the others to stubs.

    Every gap is in it; bars may end outside four times the largest gap, yet at most half of them.
    """
    tolerances = [gap.tolerance for gap in gaps if gap.tolerance is not None]
    far = [max(abs(gap.low), abs(gap.high)) for gap in gaps]
    largest = max([*tolerances, *(abs(gap.value) for gap in gaps)])
    limit = max(4 * largest, median(far))
    ends = [end for gap in gaps for end in (gap.low, gap.high)]
    # A bar that ends a little further on would touch the edge uncut, and look as if it were cut.
    near = [end for end in ends if abs(end) <= 1.25 * limit]
    return _window([0.0, *tolerances, *(gap.value for gap in gaps), *near], ends, limit)


def _window(shown: Sequence[float], ends: Iterable[float], limit: float) -> tuple[float, float]:
    """Return a range that holds every value of `shown`, and of `ends` what is within `limit` of zero."""
    low, high = extent([*shown, *(_clip(end, -limit, limit) for end in ends)])
    return low, high


def _clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def around_zero(low: float, high: float) -> dict[str, Spec]:
    """Return scale and axis of a range that holds zero: round ticks, few enough for a phone, one of them at zero."""
    power = 10.0 ** floor(log10((high - low) / 7))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if 7 * factor * power >= high - low)
    values = [index * step for index in range(ceil(low / step), floor(high / step) + 1)]
    digits = max(0, 1 - floor(log10(step)))
    return {
        "scale": {"domain": [low, high], "nice": False, "zero": False},
        "axis": {"values": values, "format": f".{digits}~f", "labelOverlap": False},
    }
