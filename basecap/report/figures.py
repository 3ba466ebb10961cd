"""The figures of a study: each is one Vega-Lite chart, interactive in the page and static as SVG."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from basecap.report.palette import BLACK, GREY, architecture_scales, dash_scale, domain_scales

#: What may stand on the x axis of a scatter: key of a point -> how it is called.
ABSCISSAE = {"held_out": "pre-training loss, held out", "training": "pre-training loss, smoothed"}
OVERALL = "all unseen domains"
NATS = "nats per token"

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
    rows = [row for row in rows if row["x"] is not None and row["loss"] is not None]
    if not rows:
        return None
    horizontal, vertical = _extent([row["x"] for row in rows]), _extent([row["loss"] for row in rows])
    ends = [min(horizontal[0], vertical[0]), max(horizontal[1], vertical[1])]
    x = alt.X("x:Q", scale=alt.Scale(domain=horizontal, nice=False), title=f"{ABSCISSAE[abscissa]} ({NATS})")
    y = alt.Y("loss:Q", scale=alt.Scale(domain=vertical, nice=False), title=f"loss on {domain} ({NATS})")
    identity = _chart([{"x": end, "loss": end} for end in ends]).mark_line(clip=True, strokeDash=[5, 4], color=GREY)
    chosen = _choice()
    base = _chart(rows).encode(
        x=x, y=y, detail="seed:N", color=_colour(study), shape=_shape(study), opacity=_unless(chosen)
    )
    lines = base.mark_line(clip=True, strokeWidth=1.2).encode(order="tokens:Q")
    points = base.mark_point(clip=True, size=55, filled=True).encode(
        tooltip=_tooltip("name", "seed", "tokens", "x", "loss", "bits_per_byte")
    )
    moving = alt.selection_interval(bind="scales", zoom="wheel![event.shiftKey]")
    return alt.layer(identity.encode(x=x, y=y), lines, points.add_params(chosen, moving)).properties(
        width=420, height=320, title=domain
    )


def forest(study: dict[str, Any]) -> Chart | None:
    """Every gap with its interval, beside zero and the tolerance."""
    rows = [
        {"name": row["name"], "verdict": row["verdict"], **part}
        for row in study["comparisons"]
        if row["gap"] is not None
        for part in [{"domain": OVERALL, **row["gap"]}, *row["domains"]]
    ]
    if not rows:
        return None
    domains = [OVERALL, *study["ood_domains"]]
    colours, shapes = domain_scales(domains)
    title = f"gap in {NATS}, positive: worse"
    base = _chart(rows).encode(
        y=alt.Y("name:N", sort=None, title=None, axis=alt.Axis(labelLimit=190), scale=alt.Scale(paddingInner=0.3)),
        yOffset=alt.YOffset("domain:N", sort=None, scale=alt.Scale(domain=domains)),
        color=alt.Color("domain:N", scale=colours, legend=_legend()),
    )
    bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2)
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(
        x=alt.X("value:Q", title=title),
        shape=alt.Shape("domain:N", scale=shapes, legend=_legend()),
        tooltip=_tooltip("name", "domain", "value", "low", "high", "verdict"),
    )
    levels = _levels(study, "x", title)
    return alt.layer(*levels, bars.encode(x=alt.X("low:Q", title=title), x2="high:Q"), dots).properties(
        width=480, height=17 * len(rows) + 20
    )


def along(study: dict[str, Any]) -> Chart | None:
    """The gap over all unseen domains along the shared range of pre-training loss, with its interval at each place."""
    rows = [
        {"name": row["name"], "loss": loss, "value": value, "low": low, "high": high}
        for row in study["comparisons"]
        if row["along"] is not None and row["along"]["low"] is not None
        for loss, value, low, high in zip(*(row["along"][key] for key in ("loss", "value", "low", "high")), strict=True)
    ]
    if not rows:
        return None
    chosen = _choice()
    x = alt.X("loss:Q", scale=alt.Scale(zero=False), title=f"{ABSCISSAE['held_out']} ({NATS})")
    title = f"gap to {study['reference']} ({NATS})"
    base = _chart(rows).encode(
        x=x, color=_colour(study, lines=True), tooltip=_tooltip("name", "loss", "value", "low", "high")
    )
    shade = alt.when(chosen).then(alt.value(0.15)).otherwise(alt.value(0))
    bands = base.mark_area().encode(y=alt.Y("low:Q", title=title), y2="high:Q", opacity=shade)
    y = alt.Y("value:Q", title=title)
    lines = base.mark_line(strokeWidth=2).encode(y=y, opacity=_unless(chosen), strokeDash=_dash(study))
    return alt.layer(*_levels(study, "y", title), bands, lines.add_params(chosen)).properties(width=480, height=300)


def training(study: dict[str, Any]) -> Chart | None:
    """Smoothed training loss (lines) and held-out loss on the training domains (points) over tokens."""
    if not study["curves"]:
        return None
    chosen = _choice()
    look = {"color": _colour(study), "detail": "seed:N", "opacity": _unless(chosen)}
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
        .mark_point(filled=True, size=45)
        .encode(x=x, y=y, shape=_shape(study), tooltip=_tooltip("name", "seed", "tokens", "loss"), **look)
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
    base = _chart(rows).encode(color=_colour(study), detail="seed:N")
    shape, tooltip = _shape(study), _tooltip("name", "seed", "subset", *_axes(found), "value", "stderr", "n")
    if not found["axes"]:
        value = alt.X("value:Q", title=title, scale=alt.Scale(zero=False))
        base = base.encode(
            y=alt.Y("subset:N", title=None, axis=alt.Axis(labelLimit=220), scale=alt.Scale(paddingInner=0.3)),
            yOffset=alt.YOffset("name:N", sort=None, scale=alt.Scale(domain=_names(study))),
        )
        bars = base.mark_rule().encode(x=alt.X("low:Q", title=title, scale=alt.Scale(zero=False)), x2="high:Q")
        dots = base.mark_point(filled=True, size=55).encode(x=value, shape=shape, tooltip=tooltip)
        return alt.layer(bars, dots).properties(width=480, height=14 * len(rows) + 20)
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


def _levels(study: dict[str, Any], channel: str, title: str) -> list[alt.Chart]:
    """Mark no gap by a solid and the tolerance by a dashed line across a position channel."""
    places = [(0.0, []), (study["tolerance"], [5, 4])]
    field = (alt.X if channel == "x" else alt.Y)("at:Q", title=title)
    return [
        _chart([{"at": place}]).mark_rule(color=GREY, strokeDash=dash).encode(**{channel: field})
        for place, dash in places
    ]


def _axes(found: dict[str, Any]) -> list[str]:
    """Return a field for each axis: a declared name may hold characters that mean something in Vega."""
    return [f"axis{index}" for index in range(len(found["axes"]))]


def _chart(rows: list[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def _names(study: dict[str, Any]) -> list[str]:
    return [entry["name"] for entry in study["settings"]["architectures"]]


def _legend(lines: bool = False) -> alt.Legend:
    """Return the legend below a chart; with `lines` it shows pieces of them, which tell dashed from solid."""
    symbol, size = ("stroke", 500) if lines else (alt.Undefined, alt.Undefined)
    return alt.Legend(title=None, orient="bottom", columns=2, symbolOpacity=1, symbolType=symbol, symbolSize=size)


def _colour(study: dict[str, Any], lines: bool = False) -> alt.Color:
    scale = architecture_scales(_names(study), study["reference"])[0]
    return alt.Color("name:N", scale=scale, legend=_legend(lines))


def _shape(study: dict[str, Any]) -> alt.Shape:
    return alt.Shape("name:N", scale=architecture_scales(_names(study), study["reference"])[1], legend=_legend())


def _dash(study: dict[str, Any]) -> alt.StrokeDash:
    return alt.StrokeDash("name:N", scale=dash_scale(_names(study), study["reference"]), legend=_legend(lines=True))


def _choice() -> alt.Parameter:
    """Let a click in the legend choose architectures."""
    return alt.selection_point(fields=["name"], bind="legend")


def _unless(chosen: alt.Parameter) -> Any:
    return alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.1))


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
