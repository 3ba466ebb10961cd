"""The figure of a number per layer: a heat map of runs and layers."""

import re
from collections.abc import Sequence
from math import hypot
from statistics import mean

from basecap.analysis.results import EvaluationResults
from basecap.report.figures.spec import Datum, Spec, category, chart, layer
from basecap.report.figures.style import ref, tooltip

#: The subset of a number of one layer, as evaluations name it.
LAYER = re.compile(r"layer (\d+)")
#: The unit of a score, as `selectivity` names it.
SCORE = "from -1 to 1"


def has_layers(found: EvaluationResults) -> bool:
    """Return whether each number of an evaluation without axes belongs to a layer."""
    return not found.axes and all(LAYER.fullmatch(row.subset) for row in found.rows)


def layers(found: EvaluationResults, metric: str, names: Sequence[str]) -> Spec | None:
    """Draw the numbers of each layer of each run at its last evaluation point, means over seeds.

    Standard errors, shown by the pointer, cover the variation between examples.

    Blue is positive and red negative, strongest at the largest number of the figure; of scores at 1, so that scores
    near 0 look like it.

    Args:
        found: the evaluation, whose subsets are "layer 0", "layer 1" and so on.
        metric: which of its numbers.
        names: the runs from the top down; those without numbers are left out.
    """
    values: dict[tuple[str, int], list[float]] = {}
    errors: dict[tuple[str, int], list[float]] = {}
    for row in found.rows:
        if row.metric == metric and row.value is not None:
            number = int(row.subset.removeprefix("layer "))
            values.setdefault((row.name, number), []).append(row.value)
            errors.setdefault((row.name, number), []).append(row.stderr or 0.0)
    rows: list[Datum] = [
        {
            "run": name,
            "layer": number,
            "value": mean(several),
            "stderr": hypot(*errors[name, number]) / len(several),
            "text": f"{round(mean(several), 2) + 0.0:.2f}",
        }
        for (name, number), several in values.items()
    ]
    if not rows:
        return None
    drawn = [name for name in names if any(row["run"] == name for row in rows)]
    numbers = sorted({number for _, number in values})
    unit, _ = found.kind_of(metric)
    far = 1.0 if unit == SCORE else max(abs(row["value"]) for row in rows) or 1.0
    look: Spec = {
        "x": category("layer", numbers, "layer", {"labelAngle": 0}),
        "y": category("run", drawn, None, {"title": None, "labelLimit": 240}),
    }
    colour = {"field": "value", "type": "quantitative", "legend": None}
    scale = {"domain": [-far, 0, far], "range": ["#e0796e", "#ffffff", "#5b9bd5"], "interpolate": "rgb"}
    squares = {**look, "color": {**colour, "scale": scale}, "tooltip": tooltip("run", "value", "stderr")}
    drawings = [
        layer(rows, {"type": "rect", "stroke": "#eeeeee"}, squares),
        layer(rows, {"type": "text", "fontSize": 12}, {**look, "text": ref("text")}),
    ]
    title = {"text": f"{found.name}: {metric}", "subtitle": unit}
    return chart(drawings, width=max(46 * len(numbers), 160), height=24 * len(drawn), title=title)
