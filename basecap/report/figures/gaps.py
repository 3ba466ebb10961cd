"""The figures of gaps: every gap with its interval, and the gap along the whole range of losses."""

from collections.abc import Iterable, Sequence
from math import ceil, floor, log10
from statistics import median
from typing import Any

import altair as alt

from basecap.report.figures.look import (
    ABSCISSAE,
    NATS,
    PICKED,
    Chart,
    Study,
    chart_of,
    colour,
    compared_at,
    dash,
    extent,
    picked,
    shape,
    tooltip,
    trained_band,
    unless_picked,
)
from basecap.report.palette import DARK_GREY
from basecap.report.words import gap_text, interval_text

#: Up to so many architectures their bands can be told apart when all are drawn.
FEW = 3


def forest(study: Study, domain: str | None = None) -> Chart | None:
    """Every gap with its intervals and the tolerance, on one domain or over all; arrowheads where a bar goes on.

    Thin: the interval that holds for all rows together. Thick: the one that holds for the row alone.
    """
    rows = [_bar(row["name"], found) for row in study["comparisons"] if (found := _on(row, domain)) is not None]
    if not rows:
        return None
    window = _forest_window(rows)

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title=f"gap in {NATS}, positive: worse", **_around_zero(window))

    def layer(data: list[dict[str, Any]]) -> alt.Chart:
        names = alt.Axis(labelLimit=150, ticks=False, domain=False)
        return chart_of(data).encode(
            y=alt.Y("name:N", sort=[row["name"] for row in rows], title=None, axis=names),
            color=colour(study, rows, legend=False),
            opacity=unless_picked(),
            tooltip=tooltip("name", "gap", "interval", "alone", "verdict", "tolerance"),
        )

    layers = []
    for ends, width in (("low", "high"), 2.0), (("alone_low", "alone_high"), 4.5):
        bars = [row | {"from": _clip(row[ends[0]], *window), "to": _clip(row[ends[1]], *window)} for row in rows]
        layers.append(layer(bars).mark_rule(strokeWidth=width).encode(x=x("from"), x2="to:Q"))
    for cut, end, mark, inwards in (
        ([row for row in rows if row["low"] < window[0]], window[0], "triangle-left", 5),
        ([row for row in rows if row["high"] > window[1]], window[1], "triangle-right", -5),
    ):
        heads = layer([row | {"end": end} for row in cut])
        layers.append(
            heads.mark_point(shape=mark, filled=True, size=110, opacity=1, xOffset=inwards).encode(x=x("end"))
        )
    dots = layer(rows).mark_point(filled=True, size=130, opacity=1, stroke="#ffffff", strokeWidth=1)
    layers.append(dots.encode(x=x("value"), shape=shape(study, rows, legend=False)).add_params(picked()))
    if study["ood_domains"]:
        limits = layer([row for row in rows if row["tolerance"] is not None])
        tick = limits.mark_tick(thickness=2, size=20).encode(x=x("tolerance"), color=alt.value(DARK_GREY))
        layers.insert(0, tick)
    title = domain or f"all {'unseen ' if study['ood_domains'] else ''}domains"
    return alt.layer(_zero(x("at")), *layers).properties(width=420, height=24 * len(rows) + 12, title=title)


def _on(row: dict[str, Any], domain: str | None) -> dict[str, Any] | None:
    """Return the gap of a row on a domain, that over all where None."""
    if domain is None:
        return row["gap"]
    return next((part for part in row["domains"] if part["domain"] == domain), None)


def _bar(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return what the chart of gaps shows of one."""
    single = found["single"]
    return {"name": name, **{key: found[key] for key in ("value", "low", "high", "tolerance", "verdict")}} | {
        "alone_low": single["low"],
        "alone_high": single["high"],
        "gap": gap_text(found),
        "interval": interval_text(found),
        "alone": interval_text(single),
    }


def along(study: Study) -> Chart | None:
    """The gap along the whole range of losses, thick over each row's trained range, with its interval at each place.

    Bands of many architectures hide the lines and each other: then only those picked in the page's legend are drawn.
    """
    rows = [
        {"name": row["name"], "loss": loss, "value": value, "trained": row["range"][0] <= loss <= row["range"][1]}
        | ({} if low is None else {"low": low, "high": high})
        | _told({"value": value, "low": low, "high": high})
        for row in study["comparisons"]
        if row["along"] is not None
        for loss, value, low, high in _places(row["along"])
    ]
    if not rows:
        return None
    few = len({row["name"] for row in rows}) <= FEW
    banded = [row for row in rows if "low" in row]
    shown = [0.0, *(row["value"] for row in rows)]
    ends = [row[end] for row in banded for end in ("low", "high")]
    window = _window(shown, ends, limit=(3 if few else 1) * max(map(abs, shown)))

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", title=f"gap to {study['reference']} ({NATS})", **_around_zero(window))

    def x(field: str) -> alt.X:
        scale = alt.Scale(domain=extent([row["loss"] for row in rows]), nice=False, zero=False)
        return alt.X(f"{field}:Q", scale=scale, title=f"{ABSCISSAE[compared_at(study)]} ({NATS})")

    base = chart_of(rows).encode(x=x("loss"), color=colour(study, rows, lines=True))
    shown_first = f"{PICKED}.length == 0 || " if few else ""
    shade = alt.when(f"{shown_first}indexof({PICKED}, datum.name) >= 0").then(alt.value(0.15)).otherwise(alt.value(0))
    bands = base.mark_area(clip=True, tooltip=None).encode(y=y("low"), y2="high:Q", opacity=shade)
    bands = bands.transform_filter("isValid(datum.low)")
    lines = base.encode(y=y("value"), opacity=unless_picked(), strokeDash=dash(study, rows))
    within = lines.mark_line(strokeWidth=3.5).transform_filter("datum.trained")
    # A line answers the pointer with its first place only; points that cannot be seen answer with theirs.
    places = base.mark_point(filled=True, size=60, opacity=0, aria=False).encode(
        y=y("value"), tooltip=tooltip("name", "loss", "gap", "interval")
    )
    layers = [_zero(y("at")), *([bands] if banded else []), lines.mark_line(strokeWidth=1.2), within]
    chart = alt.layer(*trained_band(study, x), *layers, places.add_params(picked()))
    return chart.properties(width=480, height=300, title="along training")


def _told(found: dict[str, Any]) -> dict[str, str]:
    return {"gap": gap_text(found), "interval": interval_text(found)}


def _places(found: dict[str, Any]) -> Iterable[tuple[float, float, float | None, float | None]]:
    """Yield loss, gap and the ends of its interval, None where a study has no interval."""
    missing = [None] * len(found["loss"])
    return zip(found["loss"], found["value"], found["low"] or missing, found["high"] or missing, strict=True)


def _zero(position: alt.X | alt.Y) -> alt.Chart:
    """Mark no gap by a line across a position, which reads the field "at"."""
    channel = "x" if isinstance(position, alt.X) else "y"
    return chart_of([{"at": 0.0}]).mark_rule(strokeWidth=1.5, color=DARK_GREY).encode(**{channel: position})


def _forest_window(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the range of gaps to draw: one wide interval must not shrink all the others to stubs.

    Every gap is in it; bars may end outside four times the largest gap, yet at most half of them.
    """
    tolerances = [row["tolerance"] for row in rows if row["tolerance"] is not None]
    far = [max(abs(row["low"]), abs(row["high"])) for row in rows]
    largest = max([*tolerances, *(abs(row["value"]) for row in rows)])
    limit = max(4 * largest, median(far))
    ends = [row[end] for row in rows for end in ("low", "high")]
    # A bar that ends a little further on would touch the edge uncut, and look as if it were cut.
    near = [end for end in ends if abs(end) <= 1.25 * limit]
    return _window([0.0, *tolerances, *(row["value"] for row in rows), *near], ends, limit)


def _window(shown: Sequence[float], ends: Iterable[float], limit: float) -> tuple[float, float]:
    """Return a range that holds every value of `shown`, and of `ends` what is within `limit` of zero."""
    low, high = extent([*shown, *(_clip(end, -limit, limit) for end in ends)])
    return low, high


def _clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def _around_zero(window: tuple[float, float]) -> dict[str, Any]:
    """Return scale and axis of a range that holds zero: round ticks, few enough for a phone, one of them at zero."""
    low, high = window
    power = 10.0 ** floor(log10((high - low) / 7))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if 7 * factor * power >= high - low)
    values = [index * step for index in range(ceil(low / step), floor(high / step) + 1)]
    return {
        "scale": alt.Scale(domain=[low, high], nice=False, zero=False),
        "axis": alt.Axis(values=values, format=f".{max(0, 1 - floor(log10(step)))}~f", labelOverlap=False),
    }
