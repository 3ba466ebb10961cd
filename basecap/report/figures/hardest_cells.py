"""The figure that compares architectures: accuracy in the hardest cells along one axis of the grid."""

from basecap.analysis.results import TaskResults
from basecap.report.figures.cells import axes_of
from basecap.report.figures.spec import Spec, chart, layer, number, unless_picked
from basecap.report.figures.style import (
    PERCENT,
    SHARE,
    colour,
    point_size,
    ref,
    reference_first,
    shape,
    stroke_width,
    tooltip,
)


def hardest_cells(study: TaskResults, task: str) -> Spec | None:
    """Accuracy on the own pattern `task` against the last axis, at the largest value of the first, by architecture.

    None where fewer than two architectures were tested, or where those cells are fewer than two.
    """
    axes = axes_of(study)
    found = [row for row in study.tests if row.train == row.test == task]
    if len(found) < 2 or len(axes) != 2:
        return None
    fixed, along = axes
    places = [cell.axis for row in found for cell in row.cells if set(axes) <= set(cell.axis)]
    most = max((place[fixed] for place in places), default=None)
    values = sorted({place[along] for place in places if place[fixed] == most})
    if len(values) < 2:
        return None
    cells = [(row.architecture, cell) for row in found for cell in row.cells if cell.axis.get(fixed) == most]
    rows = reference_first(
        study,
        [
            {"name": name, "place": cell.axis[along], **vars(cell.accuracy), "examples": cell.examples}
            for name, cell in cells
        ],
    )
    scale = {"type": "log", "base": 2, "nice": False, "domain": [values[0] / 1.1, values[-1] * 1.1]}

    def y(field: str) -> Spec:
        return number(field, "accuracy", SHARE, PERCENT)

    look = {
        "x": number("place", along, scale, {"values": values, "format": "~s", "grid": False}),
        "color": colour(study, rows),
        "opacity": unless_picked(),
    }
    mark = {
        **look,
        "y": y("value"),
        "shape": shape(study, rows),
        "size": point_size(study, 55),
        "tooltip": tooltip("name", "value", "low", "high", "examples"),
    }
    layers = [
        layer(rows, {"type": "rule", "strokeWidth": 1}, {**look, "y": y("low"), "y2": ref("high")}),
        layer(rows, {"type": "line"}, {**look, "y": y("value"), "strokeWidth": stroke_width(study, 1.5)}),
        layer(rows, {"type": "point", "filled": True}, mark),
    ]
    title = {"text": f"{task}, {fixed} {most:g}", "subtitle": "own pattern, every architecture"}
    return chart(layers, width=420, height=260, title=title, pick=True)
