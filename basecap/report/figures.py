"""The figures of a study: each is one Vega-Lite chart, interactive in the page and static as SVG."""

from collections.abc import Iterable, Sequence
from math import ceil, floor, log10
from statistics import median
from typing import Any

import altair as alt

from basecap.report.palette import BLACK, DARK_GREY, GREY, architecture_scales, dash_scale, domain_scales

#: What may stand on the x axis of a scatter: key of a point -> how it is called.
ABSCISSAE = {"held_out": "pre-training loss, held out", "training": "pre-training loss, smoothed"}
OVERALL = "all unseen domains"
NATS = "nats per token"
#: Up to so many architectures their bands can be told apart when all are drawn.
FEW = 3

Chart = alt.LayerChart | alt.FacetChart


def styled(chart: Chart) -> Chart:
    """Return the chart in the look that all figures share."""
    return chart.configure(
        font="Helvetica, Arial, sans-serif",
        background="white",
        view=alt.ViewConfig(stroke="#cccccc"),
        axis=alt.AxisConfig(
            labelFontSize=12,
            titleFontSize=13,
            titleFontWeight="normal",
            labelColor=BLACK,
            titleColor=BLACK,
            gridColor="#eeeeee",
            labelSeparation=6,
        ),
        legend=alt.LegendConfig(labelFontSize=12, labelLimit=185, labelColor=BLACK),
        title=alt.TitleConfig(fontSize=14, anchor="start", color=BLACK),
    )


def scatter(study: dict[str, Any], domain: str, abscissa: str) -> Chart | None:
    """Loss on one domain over pre-training loss, a point per evaluated checkpoint, and the line y = x."""
    rows = [
        {"name": point["name"], "seed": point["seed"], "tokens": point["tokens"], "x": point[abscissa]}
        | point["domains"][domain]
        for point in study["points"]
        if domain in point["domains"]
    ]
    rows = [row for row in rows if row["x"] is not None and row.get("loss") is not None]
    if not rows:
        return None
    horizontal, vertical = _extent([row["x"] for row in rows]), _extent([row["loss"] for row in rows])
    ends = [min(horizontal[0], vertical[0]), max(horizontal[1], vertical[1])]
    x = alt.X("x:Q", scale=alt.Scale(domain=horizontal, nice=False), title=f"{ABSCISSAE[abscissa]} ({NATS})")
    y = alt.Y("loss:Q", scale=alt.Scale(domain=vertical, nice=False), title=f"loss on {domain} ({NATS})")
    identity = _chart([{"x": end, "loss": end} for end in ends]).mark_line(clip=True, strokeDash=[5, 4], color=GREY)
    chosen = _choice()
    base = _chart(rows).encode(
        x=x, y=y, detail="seed:N", color=_colour(study, rows), shape=_shape(study, rows), opacity=_unless(chosen)
    )
    lines = base.mark_line(clip=True, strokeWidth=1.2).encode(order="tokens:Q")
    points = base.mark_point(clip=True, size=_size(rows), filled=True).encode(
        tooltip=_tooltip("name", "seed", "tokens", "x", "loss", "bits_per_byte")
    )
    moving = alt.selection_interval(bind="scales", zoom="wheel![event.shiftKey]")
    return alt.layer(identity.encode(x=x, y=y), lines, points.add_params(chosen, moving)).properties(
        width=420, height=320, title=domain
    )


def forest(study: dict[str, Any]) -> Chart | None:
    """Every gap with its interval, beside zero and the tolerance; arrowheads where the chart ends before a bar does."""
    rows = [
        {"name": row["name"], "verdict": row["verdict"], **part}
        for row in study["comparisons"]
        if row["gap"] is not None
        for part in [{"domain": OVERALL, **row["gap"]}, *row["domains"]]
    ]
    if not rows:
        return None
    window = _forest_window(rows, study["tolerance"])
    domains = [OVERALL, *study["ood_domains"]]
    colours, shapes = domain_scales(domains)
    legend = _legend([domain for domain in domains if domain in {row["domain"] for row in rows}], columns=1)
    names = list(dict.fromkeys(row["name"] for row in rows))

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title=f"gap in {NATS}, positive: worse", **_around_zero(window))

    def layer(data: list[dict[str, Any]]) -> alt.Chart:
        return _chart(data).encode(
            y=alt.Y("name:N", sort=names, title=None, axis=alt.Axis(labelLimit=190), scale=alt.Scale(paddingInner=0.3)),
            yOffset=alt.YOffset("domain:N", sort=None, scale=alt.Scale(domain=domains)),
            color=alt.Color("domain:N", scale=colours, legend=legend),
            tooltip=_tooltip("name", "domain", "value", "low", "high", "verdict"),
        )

    bars = [
        row | {"from": _clip(row["low"], *window), "to": _clip(row["high"], *window)}
        for row in rows
        if row["low"] is not None
    ]
    marks = [
        layer([row for row in bars if row["domain"] == OVERALL]).mark_rule(strokeWidth=3),
        layer([row for row in bars if row["domain"] != OVERALL]).mark_rule(strokeWidth=2),
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
    return alt.layer(*_levels(study, x("at")), *layers).properties(width=480, height=17 * len(rows) + 20)


def along(study: dict[str, Any]) -> Chart | None:
    """The gap over all unseen domains along the shared range of pre-training loss, with its interval at each place.

    Bands of many architectures hide the lines and each other: then only those picked in the legend are drawn.
    """
    rows = [
        {"name": row["name"], "loss": loss, "value": value, "low": low, "high": high}
        for row in study["comparisons"]
        if row["along"] is not None and row["along"]["low"] is not None
        for loss, value, low, high in zip(*(row["along"][key] for key in ("loss", "value", "low", "high")), strict=True)
    ]
    if not rows:
        return None
    few = len({row["name"] for row in rows}) <= FEW
    shown = [0.0, study["tolerance"], *(row["value"] for row in rows)]
    ends = [row[end] for row in rows for end in ("low", "high")]
    window = _window(shown, ends, limit=(3 if few else 1) * max(map(abs, shown)))
    chosen = _choice()

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", title=f"gap to {study['reference']} ({NATS})", **_around_zero(window))

    x = alt.X("loss:Q", scale=alt.Scale(zero=False), title=f"{ABSCISSAE['held_out']} ({NATS})")
    base = _chart(rows).encode(x=x, color=_colour(study, rows, lines=True))
    shade = alt.when(chosen, empty=few).then(alt.value(0.15)).otherwise(alt.value(0))
    bands = base.mark_area(clip=True, tooltip=None).encode(y=y("low"), y2="high:Q", opacity=shade)
    lines = base.mark_line(strokeWidth=2).encode(y=y("value"), opacity=_unless(chosen), strokeDash=_dash(study, rows))
    # A line answers the pointer with its first place only; points that cannot be seen answer with theirs.
    places = base.mark_point(filled=True, size=60, opacity=0, aria=False).encode(
        y=y("value"), tooltip=_tooltip("name", "loss", "value", "low", "high")
    )
    chart = alt.layer(*_levels(study, y("at")), bands, lines.add_params(chosen), places)
    note = alt.Title(
        "" if few else "Intervals: click on an architecture in the legend of report.html",
        fontSize=11,
        fontWeight="normal",
        color=DARK_GREY,
    )
    return chart.properties(width=480, height=300, title=note)


def training(study: dict[str, Any]) -> Chart | None:
    """Smoothed training loss (lines) and held-out loss on the training domains (points) over tokens."""
    if not study["curves"]:
        return None
    chosen = _choice()
    drawn = [*study["curves"], *study["points"]]
    look = {"color": _colour(study, drawn), "detail": "seed:N", "opacity": _unless(chosen)}
    scale, axis = alt.Scale(type="log", nice=False), alt.Axis(format="~s", grid=False)
    x = alt.X("tokens:Q", scale=scale, axis=axis, title="tokens")
    y = alt.Y("loss:Q", scale=alt.Scale(zero=False), title=f"loss ({NATS})")
    lines = _chart(study["curves"]).mark_line(strokeWidth=1.5).encode(x=x, y=y, **look)
    held_out = [
        {"name": point["name"], "seed": point["seed"], "tokens": point["tokens"], "loss": point["held_out"]}
        for point in study["points"]
    ]
    points = (
        _chart(held_out)
        .mark_point(filled=True, size=_size(held_out))
        .encode(x=x, y=y, shape=_shape(study, drawn), tooltip=_tooltip("name", "seed", "tokens", "loss"), **look)
    )
    return alt.layer(lines, points.add_params(chosen)).properties(width=480, height=320)


def evaluation(study: dict[str, Any], found: dict[str, Any], metric: str, subset: str | None) -> Chart:
    """Any declared evaluation: a curve over its first axis told apart by its second, else a mark for each subset."""
    rows = [
        {**row, **{f"axis{index}": row["axis"][axis] for index, axis in enumerate(found["axes"])}}
        | {"low": row["value"] - (row["stderr"] or 0), "high": row["value"] + (row["stderr"] or 0)}
        for row in found["rows"]
        if row["metric"] == metric and subset in (None, row["subset"]) and row["value"] is not None
    ]
    title = f"{metric} ({found['unit']}; {found['better']} is better)"
    base = _chart(rows).encode(color=_colour(study, rows), detail="seed:N")
    shape, tooltip = _shape(study, rows), _tooltip("name", "seed", "subset", *_axes(found), "value", "stderr", "n")
    if not found["axes"]:
        value = alt.X("value:Q", title=title, scale=alt.Scale(zero=False))
        base = base.encode(
            y=alt.Y("subset:N", title=None, axis=alt.Axis(labelLimit=220), scale=alt.Scale(paddingInner=0.3)),
            yOffset=alt.YOffset("name:N", sort=None, scale=alt.Scale(domain=_drawn(study, rows))),
        )
        bars = base.mark_rule().encode(x=alt.X("low:Q", title=title, scale=alt.Scale(zero=False)), x2="high:Q")
        dots = base.mark_point(filled=True, size=55).encode(x=value, shape=shape, tooltip=tooltip)
        height = 14 * len({(row["name"], row["subset"]) for row in rows}) + 20
        return alt.layer(bars, dots).properties(width=480, height=height)
    first, *others = _axes(found)
    base = base.encode(x=alt.X(f"{first}:Q", scale=alt.Scale(zero=False), title=found["axes"][0]))
    if others:
        base = base.encode(strokeDash=alt.StrokeDash(f"{others[0]}:N", legend=alt.Legend(title=found["axes"][1])))
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False))
    bars = base.mark_rule().encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    points = base.mark_point(filled=True, size=55).encode(y=y, shape=shape, tooltip=tooltip)
    return alt.layer(base.mark_line(strokeWidth=1.5).encode(y=y), bars, points).properties(
        width=480, height=300, title=subset
    )


def _levels(study: dict[str, Any], position: alt.X | alt.Y) -> list[alt.Chart]:
    """Mark no gap by a solid and the tolerance by a dashed line across a position, which reads the field "at"."""
    channel = "x" if isinstance(position, alt.X) else "y"
    places: list[tuple[float, dict[str, Any]]] = [
        (study["tolerance"], {"strokeDash": [5, 4], "color": GREY}),
        (0.0, {"strokeWidth": 1.5, "color": DARK_GREY}),
    ]
    return [_chart([{"at": place}]).mark_rule(**look).encode(**{channel: position}) for place, look in places]


def _forest_window(rows: list[dict[str, Any]], tolerance: float) -> tuple[float, float]:
    """Return the range of gaps to draw: one wide interval must not shrink all the others to stubs.

    Every gap is in it; bars may end outside four times the largest gap over all domains, yet at most half of those
    that belong to a gap over all domains.
    """
    overall = [row for row in rows if row["domain"] == OVERALL]
    whole = [row for row in rows if row["low"] is not None]
    far = [max(abs(row["low"]), abs(row["high"])) for row in whole if row["domain"] == OVERALL]
    limit = max(4 * max(tolerance, *(abs(row["value"]) for row in overall)), median(far or [0.0]))
    ends = [row[end] for row in whole for end in ("low", "high")]
    # A bar that ends a little further on would touch the edge uncut, and look as if it were cut.
    near = [end for end in ends if abs(end) <= 1.25 * limit]
    return _window([0.0, tolerance, *(row["value"] for row in rows), *near], ends, limit)


def _window(shown: Sequence[float], ends: Iterable[float], limit: float) -> tuple[float, float]:
    """Return a range that holds every value of `shown`, and of `ends` what is within `limit` of zero."""
    low, high = _extent([*shown, *(_clip(end, -limit, limit) for end in ends)])
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


def _axes(found: dict[str, Any]) -> list[str]:
    """Return a field for each axis: a declared name may hold characters that mean something in Vega."""
    return [f"axis{index}" for index in range(len(found["axes"]))]


def _chart(rows: list[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def _names(study: dict[str, Any]) -> list[str]:
    return [entry["name"] for entry in study["settings"]["architectures"]]


def _legend(shown: Sequence[str], lines: bool = False, columns: int = 2) -> alt.Legend:
    """Return the legend of what is shown below a chart; with `lines` it has pieces of them: dashed or solid."""
    symbol, size = ("stroke", 500) if lines else (alt.Undefined, alt.Undefined)
    return alt.Legend(
        title=None,
        orient="bottom",
        values=list(shown),
        columns=columns,
        symbolOpacity=1,
        symbolType=symbol,
        symbolSize=size,
    )


def _drawn(study: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return the names that rows have something of, in the order of the study."""
    found = {row["name"] for row in rows}
    return [name for name in _names(study) if name in found]


def _colour(study: dict[str, Any], rows: list[dict[str, Any]], lines: bool = False) -> alt.Color:
    scale = architecture_scales(_names(study), study["reference"])[0]
    return alt.Color("name:N", scale=scale, legend=_legend(_drawn(study, rows), lines))


def _shape(study: dict[str, Any], rows: list[dict[str, Any]]) -> alt.Shape:
    scale = architecture_scales(_names(study), study["reference"])[1]
    return alt.Shape("name:N", scale=scale, legend=_legend(_drawn(study, rows)))


def _dash(study: dict[str, Any], rows: list[dict[str, Any]]) -> alt.StrokeDash:
    scale = dash_scale(_names(study), study["reference"])
    return alt.StrokeDash("name:N", scale=scale, legend=_legend(_drawn(study, rows), lines=True))


def _choice() -> alt.Parameter:
    """Let a click in the legend choose architectures."""
    return alt.selection_point(fields=["name"], bind="legend")


def _unless(chosen: alt.Parameter) -> Any:
    return alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.1))


def _size(rows: Sequence[Any]) -> int:
    """Return the size of points, smaller where many would hide each other."""
    return 50 if len(rows) <= 150 else 25


def _extent(values: Sequence[float]) -> list[float]:
    """Return the range of values with a margin, never empty."""
    margin = 0.06 * (max(values) - min(values)) or 0.1
    return [min(values) - margin, max(values) + margin]


TITLES = {
    "name": "architecture",
    "tokens": "tokens trained on",
    "x": "pre-training loss",
    "bits_per_byte": "bits per byte",
}
FORMATS = {"tokens": ",", "n": ",", "seed": "d"}


def _tooltip(*fields: str) -> list[alt.Tooltip]:
    text = {"name", "domain", "verdict", "subset"}
    return [
        alt.Tooltip(f"{field}:N", title=TITLES.get(field, field))
        if field in text
        else alt.Tooltip(f"{field}:Q", title=TITLES.get(field, field), format=FORMATS.get(field, ".4f"))
        for field in fields
    ]
