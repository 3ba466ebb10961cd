"""The figure of what the layers of a model read: a heat map per layer."""

import base64
import struct
import zlib
from collections.abc import Mapping
from math import ceil

import numpy as np

from basecap.records.maps import Maps
from basecap.report.figures.spec import Spec, chart, layer
from basecap.report.figures.style import ref
from basecap.report.palette import BLACK

#: Layers in a row, and the side of a heat map with what is between two, in pixels.
COLUMNS, SIDE, GAP, TITLE = 4, 140, 12, 24
#: What is marked, with colour and shape.
MARKS = {
    "key": ("#4c78a8", "triangle-down"),
    "value": ("#e45756", "triangle-down"),
    "row that has to give the value of this column": ("#e45756", "circle"),
}


def influence(name: str, maps: Maps, scores: Mapping[int, float]) -> Spec:
    """Each layer's matrix: rows are positions from the top down, columns the positions that they read.

    White is 0, black the layer's largest element; in between grey goes with the square root, which shows weak factors.
    Of an example of a task, keys and values are marked above the columns, and rings show where a row that has to give
    a value would find it.

    Args:
        name: the run, in words.
        maps: what was stored of it.
        scores: selectivity by layer, of those that have one.
    """
    tiles, marks = [], []
    for index, (number, sizes) in enumerate(zip(maps.layers.tolist(), maps.sizes, strict=True)):
        row, column = divmod(index, COLUMNS)
        score = f", selectivity {round(scores[number], 2) + 0.0:.2f}" if number in scores else ""
        left, top = column * (SIDE + GAP), row * (SIDE + GAP + TITLE) + TITLE
        tile = {"left": left, "top": top, "title": f"layer {number}{score}", "url": _image(sizes)}
        tiles.append({**tile, "right": left + SIDE, "bottom": top + SIDE})
        marks += _marks(maps, left, top)
    width = min(len(tiles), COLUMNS) * (SIDE + GAP) - GAP
    height = ceil(len(tiles) / COLUMNS) * (SIDE + GAP + TITLE) - GAP

    def at(field: str, extent: int, downwards: bool = False) -> Spec:
        ends = [extent, 0] if downwards else [0, extent]
        return {"field": field, "type": "quantitative", "scale": {"domain": ends, "nice": False}, "axis": None}

    look = {"x": at("left", width), "y": at("top", height, downwards=True)}
    picture = {"type": "image", "width": SIDE, "height": SIDE, "align": "left", "baseline": "top"}
    text = {"type": "text", "align": "left", "baseline": "bottom", "dy": -8, "fontSize": 11, "color": BLACK}
    frame = {"type": "rect", "filled": False, "stroke": "#cccccc"}
    layers = [
        layer(tiles, picture, {**look, "url": ref("url"), "description": ref("title")}),
        layer(tiles, frame, {**look, "x2": ref("right"), "y2": ref("bottom")}),
        layer(tiles, text, {**look, "text": ref("title")}),
        *([layer(marks, {"type": "point", "size": 20, "strokeWidth": 1.2}, {**look, **_kinds()})] if marks else []),
    ]
    title = f"{name}: {maps.input}, {maps.tokens} tokens"
    # Images do not stretch with the page.
    found = chart(layers, width=width, height=height, title=title, stretches=False)
    return found | {"view": {"stroke": "transparent"}}


def _kinds() -> Spec:
    """Return colour and shape of marks, with one legend."""
    colours, shapes = zip(*MARKS.values(), strict=True)
    legend = {"title": None, "orient": "bottom", "columns": 1, "labelLimit": 400}
    kind = {"field": "mark", "type": "nominal", "legend": legend}
    return {
        "color": {**kind, "scale": {"domain": list(MARKS), "range": list(colours)}},
        "shape": {**kind, "scale": {"domain": list(MARKS), "range": list(shapes)}},
    }


def _marks(maps: Maps, left: float, top: float) -> list[dict[str, float | str]]:
    """Return the marks of one picture: the position of each in pixels, and what it marks."""
    pixels = SIDE / maps.tokens
    key, value, asked = MARKS
    above = [(key, s) for s in maps.keys.tolist()] + [(value, s) for s in maps.values.tolist()]
    return [
        *({"left": left + (s + 0.5) * pixels, "top": top - 4, "mark": mark} for mark, s in above),
        *(
            {"left": left + (s + 0.5) * pixels, "top": top + (t + 0.5) * pixels, "mark": asked}
            for t, s in maps.asked.tolist()
        ),
    ]


def _fewer(shares_SS: np.ndarray) -> np.ndarray:
    """Return a matrix of at most a row per pixel; each element is the largest of a square, so that thin lines stay."""
    size = ceil(len(shares_SS) / SIDE)
    count = ceil(len(shares_SS) / size)
    padded = np.zeros((count * size, count * size), shares_SS.dtype)
    padded[: len(shares_SS), : len(shares_SS)] = shares_SS
    return padded.reshape(count, size, count, size).max(axis=(1, 3))


def _image(shares_SS: np.ndarray) -> str:
    """Return a grey PNG of a matrix of shares as a URL that holds it, black at 1."""
    grey = (255 * (1 - np.sqrt(np.clip(_fewer(shares_SS).astype(np.float64), 0, 1)))).round().astype(np.uint8)
    grey = grey.repeat(ceil(SIDE / len(grey)), axis=0).repeat(ceil(SIDE / len(grey)), axis=1)  # else edges are blurred
    height, width = grey.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), grey], axis=1)  # each line begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")
    content = b"\x89PNG\r\n\x1a\n"
    for kind, body in parts:
        content += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return "data:image/png;base64," + base64.b64encode(content).decode()
