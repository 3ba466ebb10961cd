"""Test loss over training loss: the figures 1, 2a, 2b, 3, 6, 7, 8 and 9 of the first paper (arXiv 2505.18522)."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

import altair as alt

from basecap.names import PAPER
from basecap.report.figures.look import (
    NATS,
    Chart,
    Rows,
    Study,
    chart_of,
    colour,
    extent,
    names_of,
    picked,
    shape,
    size_of_points,
    tooltip,
    unless_picked,
)


def losses(study: Study) -> tuple[Chart | None, Chart | None]:
    """Return a point per evaluated checkpoint, and the published points.

    x is the smoothed training loss, as in the paper; verdicts compare at held-out loss. y is the mean over the unseen
    domains, each counted alike (our choice: the paper does not say), or the held-out loss where all domains train.
    """
    figure = study["settings"]["figure"]
    ours = [
        {"name": point["name"], "seed": point["seed"], "tokens": point["tokens"], "x": point["training"], "loss": loss}
        for point in study["points"]
        if point["training"] is not None and (loss := _test_loss(study, point)) is not None
    ]
    values = (figure.get("published") or {"values": {}})["values"]
    published = [{"name": name, "x": x, "loss": loss} for name in names_of(study) for x, loss in values.get(name, ())]
    axes = (figure.get("x"), figure.get("y")) if study["scale"] in (None, PAPER) else (None, None)
    measured = _points(study, ours, axes, filled=True).properties(title="measured here") if ours else None
    if not published:
        return measured, None
    title = f"published: {figure['published']['source']}"
    return measured, _points(study, published, axes, filled=False).properties(title=title)


def _test_loss(study: Study, point: dict[str, Any]) -> float | None:
    if not study["ood_domains"]:
        return point["held_out"]
    found = [point["domains"].get(domain, {}).get("loss") for domain in study["ood_domains"]]
    return None if None in found else mean(found)


def _points(study: Study, rows: Rows, axes: Sequence[list[float] | None], *, filled: bool) -> Chart:
    """Draw points; `axes` are ranges of x and y, those of the points where None."""
    tested = f"mean of {', '.join(study['ood_domains'])}" if study["ood_domains"] else "mixed domains"
    horizontal, vertical = (
        alt.Scale(domain=axis or extent([row[key] for row in rows]), nice=False)
        for key, axis in zip(("x", "loss"), axes, strict=True)
    )
    seen = ("name", "seed", "tokens", "x", "loss") if filled else ("name", "x", "loss")
    points = (
        chart_of(rows)
        .mark_point(clip=True, filled=filled, size=size_of_points(rows))
        .encode(
            x=alt.X("x:Q", scale=horizontal, title=f"pre-training loss: smoothed training loss ({NATS})"),
            y=alt.Y("loss:Q", scale=vertical, title=f"test loss, {tested} ({NATS})"),
            color=colour(study, rows),
            shape=shape(study, rows),
            opacity=unless_picked(),
            tooltip=tooltip(*seen),
        )
        .add_params(picked())
    )
    return alt.layer(points).properties(width=420, height=320)
