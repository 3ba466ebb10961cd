"""The figure of one task's grid: accuracy by two axes of its cells, such as length and pairs."""

from basecap.analysis.results import TaskResults
from basecap.analysis.tasks.recall_rows import AccuracyRow
from basecap.report.figures.spec import Spec, category, chart, layer
from basecap.report.figures.style import SHARE_COLOUR, SHARE_INK, ref, tooltip


def axes_of(study: TaskResults) -> list[str]:
    """Return the axes over which the cells of a study vary, in the order of its records."""
    places = [cell.axis for row in study.tests for cell in row.cells]
    names = list(dict.fromkeys(axis for place in places for axis in place))
    return [axis for axis in names if len({place.get(axis) for place in places}) > 1]


def cells(study: TaskResults, row: AccuracyRow) -> Spec | None:
    """Accuracy of one row of `tests` in each cell; None where its cells do not vary over exactly two axes."""
    axes = axes_of(study)
    if len(axes) != 2 or not all(set(axes) <= set(cell.axis) for cell in row.cells):
        return None
    rows = [
        {
            "across": cell.axis[axes[0]],
            "upwards": cell.axis[axes[1]],
            **vars(cell.accuracy),
            "whole cases": cell.case_accuracy.value if cell.case_accuracy else None,
            "text": f"{100 * cell.accuracy.value:.0f}",
            "examples": cell.examples,
        }
        for cell in row.cells
    ]
    across, upwards = (sorted({found[axis] for found in rows}) for axis in ("across", "upwards"))
    places = [
        {"field": field, "type": "quantitative", "title": axis}
        for field, axis in zip(("across", "upwards"), axes, strict=True)
    ]
    look = {
        "x": category("across", across, axes[0], {"labelAngle": 0}),
        "y": category("upwards", upwards[::-1], axes[1]),
    }
    shown = [*places, *tooltip("value", "low", "high", "whole cases", "examples")]
    squares = layer(rows, {"type": "rect"}, {**look, "color": SHARE_COLOUR, "tooltip": shown})
    numbers = layer(rows, {"type": "text", "fontSize": 13}, {**look, "text": ref("text"), "color": SHARE_INK})
    return chart([squares, numbers], width=56 * len(across), height=27 * len(upwards), title=title_of(row))


def title_of(row: AccuracyRow) -> Spec:
    """Return a title of two lines: the architecture, and what it was trained and tested on."""
    same = row.train == row.test
    where = f"{row.train}, its own pattern" if same else f"trained on {row.train}, tested on {row.test}"
    return {"text": row.architecture, "subtitle": where}
