"""The figures of gaps: every gap with its interval, and the gap along the whole range of losses."""

from collections.abc import Iterable, Sequence
from math import ceil, floor, log10
from statistics import median
from typing import Any

import altair as alt

from basecap.report.figures.look import (
    ABSCISSAE,
    NATS,
    Chart,
    Study,
    chart_of,
    choice,
    colour,
    compared_at,
    dash,
    extent,
    legend_of,
    tooltip,
    trained_band,
    unless,
)
from basecap.report.palette import DARK_GREY, domain_scales

#: Up to so many architectures their bands can be told apart when all are drawn.
FEW = 3
#: What the chart of all gaps shows of each.
SHOWN = ("value", "low", "high", "tolerance", "verdict")


def forest(study: Study) -> Chart | None:
    """Every gap with its interval and its tolerance; arrowheads where the chart ends before a bar does."""
    tested = study["ood_domains"] or study["train_domains"]
    overall = f"all {'unseen ' if study['ood_domains'] else ''}domains"
    rows = [
        {"name": row["name"], "domain": domain, **{key: part[key] for key in SHOWN}}
        for row in study["comparisons"]
        if row["gap"] is not None
        for domain, part in [(overall, row["gap"]), *((part["domain"], part) for part in row["domains"])]
    ]
    if not rows:
        return None
    window = _forest_window(rows, overall)
    domains = [overall, *tested]
    colours, shapes = domain_scales(domains)
    legend = legend_of([domain for domain in domains if domain in {row["domain"] for row in rows}], columns=1)
    names = list(dict.fromkeys(row["name"] for row in rows))

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title=f"gap in {NATS}, positive: worse", **_around_zero(window))

    def layer(data: list[dict[str, Any]]) -> alt.Chart:
        return chart_of(data).encode(
            y=alt.Y("name:N", sort=names, title=None, axis=alt.Axis(labelLimit=190), scale=alt.Scale(paddingInner=0.3)),
            yOffset=alt.YOffset("domain:N", sort=None, scale=alt.Scale(domain=domains)),
            color=alt.Color("domain:N", scale=colours, legend=legend),
            tooltip=tooltip("name", "domain", *SHOWN),
        )

    bars = [row | {"from": _clip(row["low"], *window), "to": _clip(row["high"], *window)} for row in rows]
    marks = [
        layer([row for row in bars if row["domain"] == overall]).mark_rule(strokeWidth=3),
        layer([row for row in bars if row["domain"] != overall]).mark_rule(strokeWidth=2),
    ]
    layers = [mark.encode(x=x("from"), x2="to:Q") for mark in marks]
    for cut, end, shape, inwards in (
        ([row for row in bars if row["low"] < window[0]], window[0], "triangle-left", 5),
        ([row for row in bars if row["high"] > window[1]], window[1], "triangle-right", -5),
    ):
        heads = layer([row | {"end": end} for row in cut])
        layers.append(
            heads.mark_point(shape=shape, filled=True, size=120, opacity=1, xOffset=inwards).encode(x=x("end"))
        )
    dots = layer(rows).mark_point(filled=True, size=60, opacity=1)
    layers.append(dots.encode(x=x("value"), shape=alt.Shape("domain:N", scale=shapes, legend=legend)))
    if study["ood_domains"]:
        limits = layer([row for row in rows if row["tolerance"] is not None])
        layers.insert(0, limits.mark_tick(color=DARK_GREY, thickness=2, size=15).encode(x=x("tolerance")))
    return alt.layer(_zero(x("at")), *layers).properties(width=480, height=17 * len(rows) + 20)


def along(study: Study) -> Chart | None:
    """The gap along the whole range of losses, thick over each row's trained range, with its interval at each place.

    Bands of many architectures hide the lines and each other: then only those picked in the legend are drawn.
    """
    rows = [
        {"name": row["name"], "loss": loss, "value": value, "trained": row["range"][0] <= loss <= row["range"][1]}
        | ({} if low is None else {"low": low, "high": high})
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
    chosen = choice()

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", title=f"gap to {study['reference']} ({NATS})", **_around_zero(window))

    def x(field: str) -> alt.X:
        scale = alt.Scale(domain=extent([row["loss"] for row in rows]), nice=False, zero=False)
        return alt.X(f"{field}:Q", scale=scale, title=f"{ABSCISSAE[compared_at(study)]} ({NATS})")

    base = chart_of(rows).encode(x=x("loss"), color=colour(study, rows, lines=True))
    shade = alt.when(chosen, empty=few).then(alt.value(0.15)).otherwise(alt.value(0))
    bands = base.mark_area(clip=True, tooltip=None).encode(y=y("low"), y2="high:Q", opacity=shade)
    bands = bands.transform_filter("isValid(datum.low)")
    lines = base.encode(y=y("value"), opacity=unless(chosen), strokeDash=dash(study, rows))
    within = lines.mark_line(strokeWidth=3.5).transform_filter("datum.trained")
    # A line answers the pointer with its first place only; points that cannot be seen answer with theirs.
    places = base.mark_point(filled=True, size=60, opacity=0, aria=False).encode(
        y=y("value"), tooltip=tooltip("name", "loss", "value", "low", "high")
    )
    layers = [_zero(y("at")), *([bands] if banded else []), lines.mark_line(strokeWidth=1.2), within]
    chart = alt.layer(*trained_band(study, x), *layers[:-1], layers[-1].add_params(chosen), places)
    note = alt.Title(
        "" if few or not banded else "Intervals: click on an architecture in the legend of report.html",
        fontSize=11,
        fontWeight="normal",
        color=DARK_GREY,
    )
    return chart.properties(width=480, height=300, title=note)


def _places(found: dict[str, Any]) -> Iterable[tuple[float, float, float | None, float | None]]:
    """Yield loss, gap and the ends of its interval, None where a study has no interval."""
    missing = [None] * len(found["loss"])
    return zip(found["loss"], found["value"], found["low"] or missing, found["high"] or missing, strict=True)


def _zero(position: alt.X | alt.Y) -> alt.Chart:
    """Mark no gap by a line across a position, which reads the field "at"."""
    channel = "x" if isinstance(position, alt.X) else "y"
    return chart_of([{"at": 0.0}]).mark_rule(strokeWidth=1.5, color=DARK_GREY).encode(**{channel: position})


def _forest_window(rows: list[dict[str, Any]], overall: str) -> tuple[float, float]:
    """Return the range of gaps to draw: one wide interval must not shrink all the others to stubs.

    Every gap is in it; bars may end outside four times the largest gap over all domains, yet at most half of those
    that belong to a gap over all domains.
    """
    tolerances = [row["tolerance"] for row in rows if row["tolerance"] is not None]
    far = [max(abs(row["low"]), abs(row["high"])) for row in rows if row["domain"] == overall]
    largest = max([*tolerances, *(abs(row["value"]) for row in rows if row["domain"] == overall)])
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
