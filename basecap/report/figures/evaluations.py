"""The figure of a declared evaluation."""

from typing import Any

import altair as alt

from basecap.report.figures.look import Chart, Study, chart_of, colour, drawn, shape, tooltip


def evaluation(study: Study, found: dict[str, Any], metric: str, subset: str | None) -> Chart:
    """Any declared evaluation: a curve over its first axis told apart by its second, else a mark for each subset."""
    rows = [
        {**row, **{f"axis{index}": row["axis"][axis] for index, axis in enumerate(found["axes"])}}
        | {"low": row["value"] - (row["stderr"] or 0), "high": row["value"] + (row["stderr"] or 0)}
        for row in found["rows"]
        if row["metric"] == metric and subset in (None, row["subset"]) and row["value"] is not None
    ]
    better = "" if found["better"] == "neither" else f"; {found['better']} is better"
    title = f"{metric} ({found['unit']}{better})"
    base = chart_of(rows).encode(color=colour(study, rows), detail="seed:N")
    shown = tooltip("name", "seed", "subset", *_axes(found), "value", "stderr", "n")
    if not found["axes"]:
        order = list(dict.fromkeys(row["subset"] for row in rows))
        value = alt.X("value:Q", title=title, scale=alt.Scale(zero=False))
        base = base.encode(
            y=alt.Y(
                "subset:N",
                sort=order,
                title=None,
                axis=alt.Axis(labelLimit=220),
                scale=alt.Scale(paddingInner=0.3),
            ),
            yOffset=alt.YOffset("name:N", sort=None, scale=alt.Scale(domain=drawn(study, rows))),
        )
        bars = base.mark_rule().encode(x=alt.X("low:Q", title=title, scale=alt.Scale(zero=False)), x2="high:Q")
        dots = base.mark_point(filled=True, size=55).encode(x=value, shape=shape(study, rows), tooltip=shown)
        height = 14 * len({(row["name"], row["subset"]) for row in rows}) + 20
        return alt.layer(bars, dots).properties(width=480, height=height)
    first, *others = _axes(found)
    base = base.encode(x=alt.X(f"{first}:Q", scale=alt.Scale(zero=False), title=found["axes"][0]))
    if others:
        base = base.encode(strokeDash=alt.StrokeDash(f"{others[0]}:N", legend=alt.Legend(title=found["axes"][1])))
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False))
    bars = base.mark_rule().encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    points = base.mark_point(filled=True, size=55).encode(y=y, shape=shape(study, rows), tooltip=shown)
    return alt.layer(base.mark_line(strokeWidth=1.5).encode(y=y), bars, points).properties(
        width=480, height=300, title=subset
    )


def _axes(found: dict[str, Any]) -> list[str]:
    """Return a field for each axis: a declared name may hold characters that mean something in Vega."""
    return [f"axis{index}" for index in range(len(found["axes"]))]
