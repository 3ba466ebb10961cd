"""The figure of training on tasks: accuracy on validation examples over tokens."""

from basecap.analysis.results import TaskResults
from basecap.report.figures.spec import Rows, Spec, chart, layer, number, unless_picked
from basecap.report.figures.style import (
    PERCENT,
    SHARE,
    colour,
    point_size,
    reference_first,
    shape,
    stroke_width,
    tooltip,
)


def learning(study: TaskResults, task: str) -> Spec | None:
    """Accuracy of every run trained on `task` over tokens, mean over cells; larger marks are the points that count."""
    runs = {point.name: point.architecture for point in study.points if point.train == task}
    counts = {(point.name, point.seed, point.step) for point in study.points if point.train == task}
    rows: Rows = [
        {
            "name": runs[point.name],
            "seed": point.seed,
            "tokens": point.tokens,
            "accuracy": point.accuracy,
            "counts": (point.name, point.seed, point.step) in counts,
        }
        for point in study.learning
        if point.name in runs
    ]
    if not rows:
        return None
    rows = reference_first(study, rows)
    look = {
        "x": number("tokens", "tokens trained on", {"nice": False}, {"format": "~s", "grid": False}),
        "y": number("accuracy", "accuracy on validation examples", SHARE, PERCENT),
        "color": colour(study, rows),
        "detail": {"field": "seed", "type": "nominal"},
        "opacity": unless_picked(),
    }
    width, size = stroke_width(study, 1.5), point_size(study, 80)
    mark = {"shape": shape(study, rows), "size": size, "tooltip": tooltip("name", "seed", "tokens", "accuracy")}
    layers = [
        layer(rows, {"type": "line"}, {**look, "strokeWidth": width}),
        layer(rows, {"type": "point", "filled": True}, {**look, **mark}, "datum.counts"),
    ]
    return chart(layers, width=420, height=260, title=f"trained on {task}", pick=True)
