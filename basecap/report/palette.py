"""Colours and marks that people with any colour vision can tell apart: never colour alone."""

from collections.abc import Sequence
from typing import Any

import altair as alt

BLACK, DARK_GREY, GREY, BLUE = "#1b1b1b", "#595959", "#8a8a8a", "#0072b2"
#: Okabe and Ito without yellow, which is too light on white, then dark colours of Paul Tol's muted scheme.
COLOURS = (
    BLUE, "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#117733", "#332288", "#999933",
)  # fmt: skip
#: Marks by their Vega name -> their outline around (18, 7), for the legend of the page.
MARKS = {
    "circle": "M13 7a5 5 0 1 0 10 0a5 5 0 1 0-10 0",
    "square": "M13.5 2.5h9v9h-9z",
    "triangle-up": "M18 2l5.5 9.5h-11z",
    "diamond": "M18 1l5 6-5 6-5-6z",
    "cross": "M16 2h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
    "triangle-down": "M18 12l5.5-9.5h-11z",
    "triangle-right": "M23 7l-9-5.5v11z",
}
SHAPES = tuple(MARKS)


def architecture_scales(names: Sequence[str], reference: str) -> tuple[alt.Scale, alt.Scale]:
    """Return scales of colour and shape: the reference is a black circle; shapes differ where colours come again."""
    others = [name for name in names if name != reference]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(others)} | {reference: BLACK}
    shapes = {name: SHAPES[(index + 1) % len(SHAPES)] for index, name in enumerate(others)} | {reference: SHAPES[0]}
    return (
        alt.Scale(domain=list(names), range=[colours[name] for name in names]),
        alt.Scale(domain=list(names), range=[shapes[name] for name in names]),
    )


#: Dashes of lines, the next where a colour comes again.
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])


def dash_scale(names: Sequence[str], reference: str) -> alt.Scale:
    """Return the scale of lines: dashed where a colour comes again."""
    others = [name for name in names if name != reference]
    dashes = {name: DASHES[index // len(COLOURS) % len(DASHES)] for index, name in enumerate(others)}
    return alt.Scale(domain=list(names), range=[dashes.get(name, DASHES[0]) for name in names])


def looks(names: Sequence[str], reference: str) -> list[dict[str, Any]]:
    """Return how each architecture is drawn in every chart: {"name", "colour", "dash", "mark" (an outline)}."""
    colours, shapes = architecture_scales(names, reference)
    found = zip(names, colours.range, shapes.range, dash_scale(names, reference).range, strict=True)
    return [{"name": name, "colour": colour, "dash": dash, "mark": MARKS[mark]} for name, colour, mark, dash in found]


#: Colour of a chart -> the same on a dark page; the page's style sheet puts one in the place of the other.
ON_DARK = {
    BLACK: "#f0f0f0", DARK_GREY: "#b8b8b8", GREY: "#8f8f8f", BLUE: "#4aa8e8", "#d55e00": "#ff8640",
    "#009e73": "#25c79b", "#882255": "#ee6a9c", "#117733": "#7cc46a", "#332288": "#9a8cff", "#999933": "#d0cf66",
    "#dddddd": "#4a5058", "#eeeeee": "#2c3138",
}  # fmt: skip
