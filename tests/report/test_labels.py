"""Names beside the points of a chart."""

import itertools

import numpy as np
import pytest

from basecap.report.figures.labels import LETTER, MARK, SIZE, WIDTHS, Label, Spot, named, place

HEIGHT = 300


def spots(seed: int, count: int) -> list[Spot]:
    rng = np.random.default_rng(seed)
    places = rng.uniform(0.05, 0.95, (count, 2))
    reach = rng.uniform(0, 0.2, count)
    return [
        Spot(name=f"architecture {index}", x=x, y=y, top=max(0.0, y - far), bottom=min(1.0, y + far))
        for index, ((x, y), far) in enumerate(zip(places.tolist(), reach.tolist(), strict=True))
    ]


def box(label: Label, spot: Spot, width: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the letters."""
    long = LETTER * len(label.name)
    left = spot.x * width + label.dx - {"left": 0, "center": long / 2, "right": long}[label.align]
    middle = spot.y * HEIGHT + label.dy
    return left, middle - SIZE / 2, left + long, middle + SIZE / 2


def meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("placed_for", WIDTHS)
def test_names_cover_nothing_in_areas_of_every_width(placed_for):
    """Also in wider areas than those they were placed for."""
    for seed, wider in itertools.product(range(5), (1, 1.3, 3)):
        found = spots(seed, 9)
        own = {spot.name: spot for spot in found}
        labels = place(found, found[:2], placed_for, HEIGHT)
        assert len(labels) >= 5
        width = placed_for * wider
        boxes = [box(label, own[label.name], width) for label in labels]
        assert not any(meet(one, other) for one, other in itertools.combinations(boxes, 2))
        assert all(left >= 0 and top >= 0 and right <= width and bottom <= HEIGHT for left, top, right, bottom in boxes)
        for spot in found:
            x, y = spot.x * width, spot.y * HEIGHT
            mark = (x - MARK, y - MARK, x + MARK, y + MARK)
            bar = (x - 0.5, spot.top * HEIGHT, x + 0.5, spot.bottom * HEIGHT)
            assert not any(meet(one, part) for one in boxes for part in (mark, bar))


def test_points_without_room_have_no_name():
    crowd = [Spot(name=f"architecture {index}", x=0.5, y=0.5, top=0.45, bottom=0.55) for index in range(20)]
    assert 0 < len(place(crowd, [], 250, HEIGHT)) < 20
    assert place([Spot(name="longer than the area is wide" * 3, x=0.5, y=0.5, top=0.4, bottom=0.6)], [], 250, 300) == []


def test_a_chart_shows_the_names_for_its_width():
    (spot,) = spots(0, 1)
    layers = named([{"name": spot.name}], [spot], [], {}, {}, HEIGHT)
    hidden = [part["encoding"]["opacity"]["condition"][0]["test"] for part in layers]
    for width, shown in ((200, 0), (WIDTHS[1] - 1, 0), (WIDTHS[1], 1), (1000, len(WIDTHS) - 1)):
        met = [eval(test.replace("||", "or"), {"width": width}) for test in hidden]
        assert [index for index, hides in enumerate(met) if not hides] == [shown]
