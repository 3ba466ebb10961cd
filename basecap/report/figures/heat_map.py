"""The figure of answers by two axes, such as the depth and the length of a text: a heat map per architecture."""

from basecap.analysis.results import AnswerRow, EvaluationResults, EvaluationRow
from basecap.analysis.tasks.shares import over_runs
from basecap.report.figures.spec import Spec, category, chart, layer
from basecap.report.figures.style import SHARE_COLOUR, SHARE_INK, ref, tooltip


def further_axis(found: EvaluationResults, row: EvaluationRow) -> str | None:
    """Return the axis of a share of answers beside the declared one, which makes it part of a heat map; else None."""
    others = row.axis.keys() - {*found.axes}
    return min(others) if isinstance(row, AnswerRow) and len(found.axes) == len(others) == 1 else None


def heat_map(found: EvaluationResults, name: str) -> Spec | None:
    """Shares of right answers of one architecture, means over its runs, by subset from the top and by declared axis."""
    cells: dict[tuple[str, float], list[AnswerRow]] = {}
    places: dict[str, float] = {}
    for row in (row for row in found.rows if row.name == name):
        if isinstance(row, AnswerRow) and (axis := further_axis(found, row)) is not None:
            cells.setdefault((row.subset, row.axis[found.axes[0]]), []).append(row)
            places[row.subset] = row.axis[axis]
    if not cells:
        return None
    rows = [
        {
            "name": name,
            "subset": subset,
            "place": f"{place:,g}",
            **vars(share := over_runs(own)),
            "text": f"{100 * share.value:.0f}",
            "n": min(row.n for row in own),
        }
        for (subset, place), own in cells.items()
    ]
    subsets = sorted(places, key=lambda subset: places[subset])
    across = [f"{place:,g}" for place in sorted({place for _, place in cells})]
    look = {
        "x": category("place", across, found.axes[0], {"labelAngle": 0}),
        "y": category("subset", subsets, None),
    }
    shown = [{"field": "place", "type": "nominal", "title": found.axes[0]}]
    shown += tooltip("subset", "value", "low", "high", "n")
    squares = layer(rows, {"type": "rect"}, {**look, "color": SHARE_COLOUR, "tooltip": shown})
    numbers = layer(rows, {"type": "text", "fontSize": 12}, {**look, "text": ref("text"), "color": SHARE_INK})
    title = {"text": name, "subtitle": f"{found.name}, right answers in %"}
    return chart([squares, numbers], width=max(200, 64 * len(across)), height=22 * len(subsets), title=title)
