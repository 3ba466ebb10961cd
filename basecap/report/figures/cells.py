"""The figure of one task's grid: accuracy by two axes of its cells, such as length and pairs."""

from typing import Any

import altair as alt

from basecap.report.figures.look import Chart, Study, chart_of, positions, share_colour, share_ink, tooltip


def axes_of(study: Study) -> list[str]:
    """Return the axes over which the cells of a study vary, in the order of its records."""
    places = [cell["axis"] for row in study["tests"] for cell in row["cells"]]
    names = list(dict.fromkeys(axis for place in places for axis in place))
    return [axis for axis in names if len({place.get(axis) for place in places}) > 1]


def cells(study: Study, found: dict[str, Any]) -> Chart | None:
    """Accuracy of one row of `tests` in each cell; None where its cells do not vary over exactly two axes."""
    axes = axes_of(study)
    if len(axes) != 2 or not all(set(axes) <= set(cell["axis"]) for cell in found["cells"]):
        return None
    rows = [
        {
            "across": cell["axis"][axes[0]],
            "upwards": cell["axis"][axes[1]],
            **cell["accuracy"],
            "case_accuracy": (cell["case_accuracy"] or {"value": None})["value"],
            "text": f"{100 * cell['accuracy']['value']:.0f}",
            "n": cell["examples"],
        }
        for cell in found["cells"]
    ]
    across, upwards = (sorted({row[axis] for row in rows}) for axis in ("across", "upwards"))
    places = [alt.Tooltip(f"{field}:Q", title=axis) for field, axis in zip(("across", "upwards"), axes, strict=True)]
    base = chart_of(rows).encode(
        x=alt.X(**positions("across", across, axes[0]), axis=alt.Axis(labelAngle=0)),
        y=alt.Y(**positions("upwards", upwards[::-1], axes[1])),
    )
    squares = base.mark_rect().encode(
        color=share_colour("value"), tooltip=[*places, *tooltip("value", "low", "high", "case_accuracy", "n")]
    )
    numbers = base.mark_text(fontSize=13).encode(text="text:N", color=share_ink("value"))
    return alt.layer(squares, numbers).properties(
        width=56 * len(across), height=27 * len(upwards), title=title_of(found)
    )


def title_of(found: dict[str, Any]) -> alt.Title:
    """Return a title of two lines: the architecture, and what it was trained and tested on."""
    same = found["train"] == found["test"]
    where = f"{found['train']}, its own pattern" if same else f"trained on {found['train']}, tested on {found['test']}"
    return alt.Title(found["architecture"], subtitle=where)
