"""The figure that sets architectures side by side: accuracy in the hardest cells along one axis of the grid."""

import altair as alt

from basecap.report.figures.cells import axes_of
from basecap.report.figures.look import Chart, Study, chart_of, choice, colour, shape, tooltip, unless


def rivals(study: Study, task: str) -> Chart | None:
    """Accuracy on the own pattern `task` against the last axis, at the largest value of the first, by architecture.

    None where fewer than two architectures were tested, or where those cells are fewer than two.
    """
    axes = axes_of(study)
    found = [row for row in study["tests"] if row["train"] == row["test"] == task]
    if len(found) < 2 or len(axes) != 2:
        return None
    fixed, along = axes
    places = [cell["axis"] for row in found for cell in row["cells"] if set(axes) <= set(cell["axis"])]
    most = max((place[fixed] for place in places), default=None)
    values = sorted({place[along] for place in places if place[fixed] == most})
    if len(values) < 2:
        return None
    rows = [
        {"name": row["architecture"], "place": cell["axis"][along], **cell["accuracy"], "n": cell["examples"]}
        for row in found
        for cell in row["cells"]
        if cell["axis"].get(fixed) == most
    ]
    named, chosen = study | {"names": study["architectures"]}, choice()
    scale = alt.Scale(type="log", base=2, nice=False, domain=[values[0] / 1.1, values[-1] * 1.1])
    x = alt.X("place:Q", title=along, scale=scale, axis=alt.Axis(values=values, format="~s", grid=False))

    def y(field: str) -> alt.Y:
        axis = alt.Axis(format=".0%", tickCount=5)
        return alt.Y(f"{field}:Q", title="accuracy", scale=alt.Scale(domain=[0, 1], nice=False), axis=axis)

    base = chart_of(rows).encode(x=x, color=colour(named, rows), opacity=unless(chosen))
    points = base.mark_point(filled=True, size=55).encode(
        y=y("value"), shape=shape(named, rows), tooltip=tooltip("name", "value", "low", "high", "n")
    )
    rules = base.mark_rule(strokeWidth=1, tooltip=None).encode(y=y("low"), y2="high:Q")
    lines = base.mark_line(strokeWidth=1.5).encode(y=y("value"))
    title = alt.Title(f"{task}, {fixed} {most:g}", subtitle="own pattern, every architecture")
    return alt.layer(rules, lines, points.add_params(chosen)).properties(width=420, height=260, title=title)
