"""Names beside the points of a chart, where they cover nothing and leave its area nowhere."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from basecap.report.figures.spec import IS_PICKED, Spec, layer
from basecap.report.figures.style import ref
from basecap.report.palette import BLACK

#: Height of the letters in pixels, and mean width of one, of Helvetica and of fonts like it.
SIZE, LETTER = 11, 5.6
#: Half the width of a mark and of a bar, with the space around them.
MARK, BAR = 7.0, 2.0
#: Boxes that stand for a line between two points.
STEPS = 60
#: Widths in pixels of the area between the axes for which names are placed: on a phone, on screens, in a file. Names
#: that fit into one fit into wider ones too.
WIDTHS = (250, 290, 350, 420)

Align = Literal["left", "center", "right"]


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A point to be named, and its bar: shares of the area's width from the left and of its height from the top."""

    name: str
    x: float
    y: float
    top: float
    bottom: float


@dataclass(frozen=True, kw_only=True)
class Label:
    """Where a name stands: pixels from its point to the anchor, and which part of the text the anchor is."""

    name: str
    dx: float
    dy: float
    align: Align


@dataclass(frozen=True)
class _Box:
    """What something takes of the area, in pixels; its point is `at`."""

    at: float
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "_Box") -> bool:
        """Whether the two would cover each other, also in a wider area, which moves their points further apart."""
        if self.top >= other.bottom or other.top >= self.bottom:
            return False
        # Points side by side may not change sides with the names between them; one above the other they stay.
        beside = abs(self.at - other.at) > 0.5
        left, right = (min(self.left, self.at), max(self.right, self.at)) if beside else (self.left, self.right)
        start, end = (min(other.left, other.at), max(other.right, other.at)) if beside else (other.left, other.right)
        return left < end and start < right


def named(
    rows: Sequence[Mapping[str, object]], spots: Sequence[Spot], path: Sequence[Spot], x: Spec, y: Spec, height: int
) -> list[Spec]:
    """Return layers that name points, one for each of `WIDTHS`, of which a chart shows the one that suits its width.

    Args:
        rows: data of the points.
        spots: where they are.
        path: those that a line joins.
        x, y: their positions in the chart.
        height: of the area between the axes, in pixels.
    """
    own = {row["name"]: row for row in rows}
    layers = []
    for width, wider in zip(WIDTHS, (*WIDTHS[1:], None), strict=True):
        found = [{**own[label.name], **vars(label)} for label in place(spots, path, width, height)]
        mark: Spec = {"type": "text", "fontSize": SIZE, "color": BLACK, "baseline": "middle", "aria": False}
        mark |= {key: {"expr": f"datum.{key}"} for key in ("dx", "dy", "align")}
        others = [*([f"width < {width}"] if width > WIDTHS[0] else []), *([f"width >= {wider}"] if wider else [])]
        seen = [{"test": " || ".join(others), "value": 0}, {"test": IS_PICKED, "value": 1}]
        look = {"x": x, "y": y, "text": ref("name"), "opacity": {"condition": seen, "value": 0.08}}
        layers.append(layer(found, mark, look))
    return layers


def place(spots: Sequence[Spot], path: Sequence[Spot], width: float, height: float) -> list[Label]:
    """Return a name for each point that has room for one, those with the fewest places first.

    >>> spot = Spot(name="a", x=0.5, y=0.5, top=0.4, bottom=0.6)
    >>> place([spot], [], 250, 300)
    [Label(name='a', dx=9.0, dy=0, align='left')]
    """
    taken = [box for spot in spots for box in _drawn(spot, width, height)]
    taken += [box for ends in pairwise(path) for box in _along(*ends, width, height)]
    waiting = {spot.name: list(_places(spot, width, height)) for spot in spots}
    found = []
    while waiting:
        free = {
            name: [(label, box) for label, box in places if not any(box.meets(other) for other in taken)]
            for name, places in waiting.items()
        }
        waiting = {name: places for name, places in free.items() if places}
        if waiting:
            name = min(waiting, key=lambda name: len(waiting[name]))
            label, box = waiting.pop(name)[0]
            found.append(label)
            taken.append(box)
    return found


def _drawn(spot: Spot, width: float, height: float) -> Iterator[_Box]:
    """Yield what a point takes: its mark and its bar."""
    x, y = spot.x * width, spot.y * height
    yield _Box(x, x - MARK, y - MARK, x + MARK, y + MARK)
    yield _Box(x, x - BAR, spot.top * height, x + BAR, spot.bottom * height)


def _along(first: Spot, last: Spot, width: float, height: float) -> Iterator[_Box]:
    """Yield small boxes along the line between two points."""
    for step in range(1, STEPS):
        share = step / STEPS
        x = ((1 - share) * first.x + share * last.x) * width
        y = ((1 - share) * first.y + share * last.y) * height
        yield _Box(x, x - BAR, y - BAR, x + BAR, y + BAR)


def _places(spot: Spot, width: float, height: float) -> Iterator[tuple[Label, _Box]]:
    """Yield the places for a name inside the area, best first: beside the mark, along the bar, at the bar's ends."""
    x, y = spot.x * width, spot.y * height
    long, half = LETTER * len(spot.name), SIZE / 2 + 1
    top, bottom = spot.top * height - y, spot.bottom * height - y
    beside: list[tuple[float, float, Align]] = [(MARK + 2, 0, "left"), (-MARK - 2, 0, "right")]
    for step in (sign * reach * half for reach in range(1, 6) for sign in (-1, 1)):
        if top - half < step < bottom + half:
            beside += [(BAR + 4, step, "left"), (-BAR - 4, step, "right")]
    for end in (min(top, -MARK) - half - 2, max(bottom, MARK) + half + 2):
        beside += [(0, end, "center"), (-MARK, end, "left"), (MARK, end, "right")]
    for dx, dy, align in beside:
        left = x + dx - {"left": 0, "center": long / 2, "right": long}[align]
        box = _Box(x, left, y + dy - half, left + long, y + dy + half)
        if box.left >= 0 and box.right <= width and box.top >= 0 and box.bottom <= height:
            yield Label(name=spot.name, dx=dx, dy=dy, align=align), box
