"""Colours and marks that people with any colour vision can tell apart: never colour alone."""

from collections.abc import Sequence
from dataclasses import dataclass

BLACK, DARK_GREY, GREY, BLUE, GOLD = "#1b1b1b", "#595959", "#8a8a8a", "#0072b2", "#e69f00"
#: Okabe and Ito without yellow, which is too light on white, then dark colours of Paul Tol's muted scheme.
COLOURS = (
    BLUE, "#d55e00", "#009e73", "#cc79a7", GOLD, "#56b4e9", "#882255", "#117733", "#332288", "#999933",
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


#: Width of the line of the reference in pixels, more than twice that of the others.
REFERENCE_WIDTH = 4.0
#: Dashes of lines, the next where a colour is used again.
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (2, 2), (8, 2, 2, 2))


@dataclass(frozen=True, kw_only=True)
class Look:
    """How an architecture is drawn in every chart: colour, mark (its Vega name), dashes and width of lines."""

    name: str
    colour: str
    mark: str
    dash: tuple[int, ...]
    width: float = 2.0

    @property
    def outline(self) -> str:
        """The outline of the mark in the page's legend."""
        return MARKS[self.mark]


def looks(names: Sequence[str], reference: str) -> list[Look]:
    """Return the look of each architecture: the reference is a black circle on a thick line; no two are
    alike.

    >>> [(look.colour, look.mark) for look in looks(["a", "b"], "a")]
    [('#1b1b1b', 'circle'), ('#0072b2', 'square')]
    """
    found = {reference: Look(name=reference, colour=BLACK, mark=SHAPES[0], dash=DASHES[0], width=REFERENCE_WIDTH)}
    for index, name in enumerate(name for name in names if name != reference):
        found[name] = Look(
            name=name,
            colour=COLOURS[index % len(COLOURS)],
            mark=SHAPES[(index + 1) % len(SHAPES)],
            dash=DASHES[index // len(COLOURS) % len(DASHES)],
        )
    return [found[name] for name in names]


#: Colour of a chart -> its replacement on a dark page, in the style sheet of the page. Those of architectures differ
#: for people who see no red or no green by as much as the light ones do; some are therefore of another hue.
ON_DARK = {
    BLACK: "#f0f0f0", DARK_GREY: "#b8b8b8", GREY: "#8f8f8f", BLUE: "#1a7acc", "#d55e00": "#e8602c",
    "#009e73": "#2f9375", "#cc79a7": "#c2609f", "#882255": "#e3b0cf", "#117733": "#7feea4", "#332288": "#9a8cff",
    "#999933": "#e8e070", "#dddddd": "#4a5058", "#eeeeee": "#2c3138",
}  # fmt: skip
