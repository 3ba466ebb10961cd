"""What all figures share: fonts, scales, legends, and how the trained range is marked."""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from basecap.report.palette import BLACK, BLUE, DARK_GREY, GREY, architecture_scales, dash_scale

NATS = "nats per token"
#: What may stand on the x axis of a scatter: key of a point -> how it is called.
ABSCISSAE = {"held_out": "pre-training loss, held out", "training": "pre-training loss, smoothed"}

Chart = alt.LayerChart | alt.FacetChart
Rows = Sequence[dict[str, Any]]
Study = dict[str, Any]


def styled(chart: Chart) -> Chart:
    """Return the chart in the look that all figures share."""
    return chart.configure(
        font="Helvetica, Arial, sans-serif",
        background="#ffffff",
        view=alt.ViewConfig(stroke="#dddddd"),
        axis=alt.AxisConfig(
            labelFontSize=12,
            titleFontSize=13,
            titleFontWeight="normal",
            labelColor=BLACK,
            titleColor=BLACK,
            gridColor="#eeeeee",
            domainColor=GREY,
            tickColor=GREY,
            labelSeparation=6,
        ),
        legend=alt.LegendConfig(labelFontSize=12, labelLimit=185, labelColor=BLACK),
        title=alt.TitleConfig(fontSize=14, anchor="start", color=BLACK),
    )


def chart_of(rows: Rows) -> alt.Chart:
    """Return a chart whose data stand in its description."""
    return alt.Chart(alt.InlineData(values=list(rows)))


def compared_at(study: Study) -> str:
    """Return which loss of a point architectures are compared at: a mixed study has no unseen domain to keep apart."""
    return "held_out" if study["ood_domains"] else "training"


def trained_range(study: Study) -> tuple[float, float] | None:
    """Return the range of pre-training loss that gaps are means over, from the lowest end that a row has."""
    ranges = [row["range"] for row in study["comparisons"] if row["range"] is not None]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def trained_band(study: Study, x: Callable[[str], alt.X]) -> list[alt.Chart]:
    """Shade the trained range across a chart with x axis `x(field)`, and name it; nothing where there is none."""
    found = trained_range(study)
    if found is None:
        return []
    base = chart_of([{"low": found[0], "high": found[1], "label": "trained range"}])
    label = base.mark_text(align="left", baseline="top", dx=3, dy=3, fontSize=11, color=DARK_GREY)
    return [
        base.mark_rect(clip=True, color=BLUE, opacity=0.09, tooltip=None).encode(x=x("low"), x2="high:Q"),
        label.encode(x=x("low"), y=alt.value(0), text="label:N"),
    ]


def drawn(study: Study, rows: Rows) -> list[str]:
    """Return the names that rows have something of, in the order of the study."""
    found = {row["name"] for row in rows}
    return [name for name in names_of(study) if name in found]


def names_of(study: Study) -> list[str]:
    """Return what the rows of a study may be called: its architectures, or the names of runs on its tasks."""
    return study["names"]


def legend_of(shown: Sequence[str], lines: bool = False, columns: int = 2) -> alt.Legend:
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


def colour(study: Study, rows: Rows, lines: bool = False, legend: bool = True) -> alt.Color:
    """Return the colour of each architecture, the same in every chart."""
    scale = architecture_scales(names_of(study), study["reference"])[0]
    return alt.Color("name:N", scale=scale, legend=legend_of(drawn(study, rows), lines) if legend else None)


def shape(study: Study, rows: Rows, legend: bool = True) -> alt.Shape:
    """Return the mark of each architecture."""
    scale = architecture_scales(names_of(study), study["reference"])[1]
    return alt.Shape("name:N", scale=scale, legend=legend_of(drawn(study, rows)) if legend else None)


def dash(study: Study, rows: Rows) -> alt.StrokeDash:
    """Return the dashes of each architecture's line."""
    scale = dash_scale(names_of(study), study["reference"])
    return alt.StrokeDash("name:N", scale=scale, legend=legend_of(drawn(study, rows), lines=True))


def choice() -> alt.Parameter:
    """Let a click in the legend choose architectures."""
    return alt.selection_point(fields=["name"], bind="legend")


def unless(chosen: alt.Parameter) -> Any:
    """Return an opacity that fades what is not chosen."""
    return alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.1))


#: What is picked in the legend that the page has for all its charts: names of architectures, none for all.
PICKED = "picked"
#: Whether the row of a chart is drawn in full.
IS_PICKED = f"{PICKED}.length == 0 || indexof({PICKED}, datum.name) >= 0"


def picked() -> alt.Parameter:
    """Let the legend of the page choose architectures; a chart on its own shows them all."""
    return alt.param(name=PICKED, value=[])


def unless_picked(full: float = 1.0, faded: float = 0.08) -> Any:
    """Return an opacity that fades what is not picked."""
    return alt.when(IS_PICKED).then(alt.value(full)).otherwise(alt.value(faded))


def size_of_points(rows: Rows) -> int:
    """Return the size of points, smaller where many would hide each other."""
    return 50 if len(rows) <= 150 else 25


def extent(values: Sequence[float]) -> list[float]:
    """Return the range of values with a margin, never empty."""
    margin = 0.06 * (max(values) - min(values)) or 0.1
    return [min(values) - margin, max(values) + margin]


def positions(field: str, values: Sequence[Any], title: str | None) -> dict[str, Any]:
    """Return what says where categories stand on an axis: in the order of `values`, side by side."""
    return {"shorthand": f"{field}:O", "sort": list(values), "title": title, "scale": alt.Scale(domain=list(values))}


#: A label that breaks long names behind hyphens, for axes that are narrow on a phone.
BROKEN = r"split(replace(datum.label, /-(?=[^-]{6})/g, '-\n'), '\n')"


def share_colour(field: str) -> alt.Color:
    """Return the colour of a share in a heat map, from white to dark blue."""
    return alt.Color(f"{field}:Q", scale=alt.Scale(domain=[0, 1], scheme="blues"), legend=None)


def share_ink(field: str) -> Any:
    """Return the colour of a number that stands on the colour of a share."""
    return alt.when(f"datum.{field} > 0.55").then(alt.value("white")).otherwise(alt.value("black"))


TITLES = {
    "name": "architecture",
    "tokens": "tokens trained on",
    "x": "pre-training loss",
    "bits_per_byte": "bits per byte",
    "stderr": "standard error",
    "alone": "interval for this row alone",
    "between": "runs lie between",
}
FORMATS = {"tokens": ",", "n": ",", "seed": "d"}


def tooltip(*fields: str) -> list[alt.Tooltip]:
    """Return what the pointer shows of the fields of a row."""
    text = {"name", "domain", "verdict", "subset", "train", "test", "region"}
    text |= {"gap", "interval", "alone", "between"}
    return [
        alt.Tooltip(f"{field}:N", title=TITLES.get(field, field))
        if field in text
        else alt.Tooltip(f"{field}:Q", title=TITLES.get(field, field), format=FORMATS.get(field, ".4f"))
        for field in fields
    ]
