"""The figures of losses: on a domain over pre-training loss, and over tokens."""

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
    extent,
    shape,
    size_of_points,
    tooltip,
    trained_band,
    unless,
)
from basecap.report.palette import GREY


def scatter(study: Study, domain: str, abscissa: str) -> Chart | None:
    """Loss on one domain over pre-training loss, a point per evaluated checkpoint, and the line y = x.

    The trained range is shaded over the loss that it is a range of.
    """
    rows = [
        {"name": point["name"], "seed": point["seed"], "tokens": point["tokens"], "x": point[abscissa]}
        | point["domains"][domain]
        for point in study["points"]
        if domain in point["domains"]
    ]
    rows = [row for row in rows if row["x"] is not None and row.get("loss") is not None]
    if not rows:
        return None
    horizontal, vertical = extent([row["x"] for row in rows]), extent([row["loss"] for row in rows])
    ends = [min(horizontal[0], vertical[0]), max(horizontal[1], vertical[1])]

    def x(field: str) -> alt.X:
        scale = alt.Scale(domain=horizontal, nice=False)
        return alt.X(f"{field}:Q", scale=scale, title=f"{ABSCISSAE[abscissa]} ({NATS})")

    y = alt.Y("loss:Q", scale=alt.Scale(domain=vertical, nice=False), title=f"loss on {domain} ({NATS})")
    identity = chart_of([{"x": end, "loss": end} for end in ends]).mark_line(clip=True, strokeDash=[5, 4], color=GREY)
    band = trained_band(study, x) if abscissa == compared_at(study) else []
    chosen = choice()
    base = chart_of(rows).encode(
        x=x("x"), y=y, detail="seed:N", color=colour(study, rows), shape=shape(study, rows), opacity=unless(chosen)
    )
    lines = base.mark_line(clip=True, strokeWidth=1.2).encode(order="tokens:Q")
    points = base.mark_point(clip=True, size=size_of_points(rows), filled=True).encode(
        tooltip=tooltip("name", "seed", "tokens", "x", "loss", "bits_per_byte")
    )
    moving = alt.selection_interval(bind="scales", zoom="wheel![event.shiftKey]")
    return alt.layer(*band, identity.encode(x=x("x"), y=y), lines, points.add_params(chosen, moving)).properties(
        width=420, height=320, title=domain
    )


def training(study: Study) -> Chart | None:
    """Smoothed training loss (lines) and held-out loss on the training domains (points) over tokens."""
    if not study["curves"]:
        return None
    chosen = choice()
    every = [*study["curves"], *study["points"]]
    look = {"color": colour(study, every), "detail": "seed:N", "opacity": unless(chosen)}
    scale, axis = alt.Scale(type="log", nice=False), alt.Axis(format="~s", grid=False)
    x = alt.X("tokens:Q", scale=scale, axis=axis, title="tokens")
    y = alt.Y("loss:Q", scale=alt.Scale(zero=False), title=f"loss ({NATS})")
    lines = chart_of(study["curves"]).mark_line(strokeWidth=1.5).encode(x=x, y=y, **look)
    held_out = [
        {"name": point["name"], "seed": point["seed"], "tokens": point["tokens"], "loss": point["held_out"]}
        for point in study["points"]
    ]
    points = (
        chart_of(held_out)
        .mark_point(filled=True, size=size_of_points(held_out))
        .encode(x=x, y=y, shape=shape(study, every), tooltip=tooltip("name", "seed", "tokens", "loss"), **look)
    )
    return alt.layer(lines, points.add_params(chosen)).properties(width=480, height=320)
