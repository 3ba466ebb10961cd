"""Test loss over training loss: the figures 1, 2a, 2b, 3, 6, 7, 8 and 9 of the first paper (arXiv 2505.18522)."""

from statistics import mean

from basecap.analysis.results import Point, TextResults
from basecap.analysis.study_files import Figure
from basecap.names import PAPER
from basecap.report.figures.spec import Rows, Spec, chart, layer, number, published_title, unless_picked
from basecap.report.figures.style import (
    NATS,
    colour,
    extent,
    names_of,
    point_size,
    reference_first,
    shape,
    size_of_points,
    tooltip,
)


def losses(study: TextResults, figure: Figure) -> tuple[Spec | None, Spec | None]:
    """Return a point per evaluated checkpoint, and the published points.

    x is the smoothed training loss, as in the paper; verdicts compare at held-out loss. y is the mean over the unseen
    domains, each counted alike (our choice: the paper does not say), or the held-out loss where all domains train.
    """
    ours = [
        {"name": point.name, "seed": point.seed, "tokens": point.tokens, "x": point.training, "loss": loss}
        for point in study.points
        if point.training is not None and (loss := _test_loss(study, point)) is not None
    ]
    values = figure.published.values if figure.published else {}
    published = [{"name": name, "x": x, "loss": loss} for name in names_of(study) for x, loss in values.get(name, ())]
    if study.scale not in (None, PAPER):  # the paper's axes are those of its own sizes
        figure = figure.model_copy(update={"x": None, "y": None})
    measured = _points(study, ours, figure, "measured here") if ours else None
    if not published or figure.published is None:
        return measured, None
    return measured, _points(study, published, figure, published_title(figure.published.source))


def _test_loss(study: TextResults, point: Point) -> float | None:
    if not study.ood_domains:
        return point.held_out
    found = [point.loss_on(domain) for domain in study.ood_domains]
    known = [loss for loss in found if loss is not None]
    return mean(known) if len(known) == len(found) else None


def _points(study: TextResults, rows: Rows, figure: Figure, title: str | Spec) -> Spec:
    """Draw points: ours, which have a seed, are filled. Axes without a range in the figure have that of the points."""
    rows = reference_first(study, rows)
    tested = f"mean of {', '.join(study.ood_domains)}" if study.ood_domains else "mixed domains"
    ours = "seed" in rows[0]
    horizontal, vertical = (
        {"domain": ends or extent([row[key] for row in rows]), "nice": False}
        for key, ends in (("x", figure.x), ("loss", figure.y))
    )
    point = {
        "x": number("x", f"smoothed training loss ({NATS})", horizontal),
        "y": number("loss", f"test loss, {tested} ({NATS})", vertical),
        "color": colour(study, rows),
        "shape": shape(study, rows),
        "size": point_size(study, size_of_points(rows)),
        "opacity": unless_picked(),
        "tooltip": tooltip(*(("name", "seed", "tokens", "x", "loss") if ours else ("name", "x", "loss"))),
    }
    mark = {"type": "point", "clip": True, "filled": ours}
    return chart([layer(rows, mark, point)], width=420, height=320, title=title, pick=True)
