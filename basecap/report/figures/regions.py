"""The figure of what is read: which of the places that hold a right answer a model takes it from."""

from typing import Any

import altair as alt

from basecap.report.figures.look import Chart, Study, chart_of, positions, tooltip

#: What is read from no region.
NONE = "none of them"


def regions(study: Study, test: str) -> Chart | None:
    """Shares of the queried values answered with each region's value: a bar per architecture and training task."""
    found = [row for row in study["tests"] if row["test"] == test and row["regions"]]
    if not found:
        return None
    count = max(len(row["regions"]) for row in found)
    labels = [*map(str, range(1, count + 1)), NONE]
    rows = [part for row in found for part in _parts(row)]
    names = list(dict.fromkeys(row["name"] for row in rows))
    base = chart_of(rows).encode(y=alt.Y(**positions("name", names, None), axis=alt.Axis(labelLimit=190)))

    def x(field: str) -> alt.X:
        scale, axis = alt.Scale(domain=[0, 1], nice=False), alt.Axis(format=".0%", tickCount=5)
        return alt.X(f"{field}:Q", scale=scale, axis=axis, title="share of queried values")

    bars = base.mark_bar(stroke="white").encode(
        x=x("from"),
        x2="to:Q",
        color=alt.Color(
            "region:N",
            scale=alt.Scale(domain=labels, range=[*_blues(count), "#dddddd"]),
            legend=alt.Legend(title="region that is read", orient="bottom", values=labels, columns=3),
        ),
        tooltip=tooltip("name", "region", "value", "low", "high"),
    )
    wide = base.transform_filter("datum.value * width >= 45")  # pixels that a number needs
    numbers = wide.mark_text(fontSize=11, tooltip=None).encode(
        x=x("middle"), text="text:N", color=alt.Color("ink:N", scale=None)
    )
    return alt.layer(bars, numbers).properties(width=480, height=30 * len(names) + 10, title=test)


def _parts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of one bar."""
    shares = [part["value"] for part in row["regions"]]
    count, start, parts = len(shares), 0.0, []
    rest = {"value": max(0.0, 1 - sum(shares)), "low": None, "high": None}
    for index, share in enumerate([*row["regions"], rest]):
        region = str(index + 1) if index < count else NONE
        value = share["value"]
        parts.append(
            {"name": f"{row['architecture']} on {row['train']}", "region": region, **share}
            | {"from": start, "to": start + value, "middle": start + value / 2}
            | {"text": f"{region}: {100 * value:.0f} %" if index < count else f"{100 * value:.0f} %"}
            | {"ink": "white" if index < count / 2 else "black"}
        )
        start += value
    return parts


def _blues(count: int) -> list[str]:
    """Return colours from dark, the first region, to light, the last."""
    dark, light = (0x08, 0x45, 0x94), (0xC6, 0xDB, 0xEF)
    steps = [index / max(1, count - 1) for index in range(count)]
    mixed = [[round(a + step * (b - a)) for a, b in zip(dark, light, strict=True)] for step in steps]
    return ["#" + "".join(f"{part:02x}" for part in colour) for colour in mixed]
