"""The figure of what the layers of a model read: a heat map per layer."""

import base64
import struct
import zlib
from collections.abc import Mapping
from math import ceil
from typing import Any

import altair as alt
import numpy as np

from basecap.maps import Maps
from basecap.report.figures.look import Chart, chart_of

#: Layers in a row, and the side of a heat map with what is between two, in pixels.
COLUMNS, SIDE, GAP, TITLE = 4, 140, 12, 18


def influence(name: str, maps: Maps, scores: Mapping[int, float]) -> Chart:
    """Each layer's matrix: rows are positions from the top down, columns the positions that they read.

    White is 0, black the layer's largest element; in between grey goes with the square root, which shows weak factors.

    Args:
        name: the run, in words.
        maps: what was stored of it.
        scores: selectivity by layer, of those that have one.
    """
    tiles = []
    for index, (layer, sizes) in enumerate(zip(maps.layers.tolist(), maps.sizes, strict=True)):
        row, column = divmod(index, COLUMNS)
        score = f", selectivity {round(scores[layer], 2) + 0.0:.2f}" if layer in scores else ""
        left, top = column * (SIDE + GAP), row * (SIDE + GAP + TITLE)
        tile = {"left": left, "top": top + TITLE, "title": f"layer {layer}{score}", "url": _image(sizes)}
        tiles.append({**tile, "right": left + SIDE, "bottom": top + TITLE + SIDE})
    width = min(len(tiles), COLUMNS) * (SIDE + GAP) - GAP
    height = ceil(len(tiles) / COLUMNS) * (SIDE + GAP + TITLE) - GAP

    def at(channel: Any, field: str, extent: int, downwards: bool = False) -> Any:
        scale = alt.Scale(domain=[extent, 0] if downwards else [0, extent], nice=False, zero=False)
        return channel(f"{field}:Q", scale=scale, axis=None)

    base = chart_of(tiles).encode(x=at(alt.X, "left", width), y=at(alt.Y, "top", height, downwards=True))
    pictures = base.mark_image(width=SIDE, height=SIDE, align="left", baseline="top", tooltip=None)
    pictures = pictures.encode(url="url:N", description="title:N")
    frames = base.mark_rect(filled=False, stroke="#cccccc", tooltip=None).encode(x2="right:Q", y2="bottom:Q")
    titles = base.mark_text(align="left", baseline="bottom", dy=-3, fontSize=11).encode(text="title:N")
    title = f"{name}: {maps.input}, {maps.tokens} tokens"
    # Images do not stretch with the page.
    chart = alt.layer(pictures, frames, titles, view=alt.ViewBackground(stroke="transparent"))
    return chart.properties(width=width, height=height, title=title, usermeta={"stretches": False})


def _image(shares_SS: np.ndarray) -> str:
    """Return a grey PNG of a matrix of shares as a URL that holds it, black at 1."""
    grey = (255 * (1 - np.sqrt(np.clip(shares_SS.astype(np.float64), 0, 1)))).round().astype(np.uint8)
    grey = grey.repeat(ceil(SIDE / len(grey)), axis=0).repeat(ceil(SIDE / len(grey)), axis=1)  # else edges are blurred
    height, width = grey.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), grey], axis=1)  # each line begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")
    content = b"\x89PNG\r\n\x1a\n"
    for kind, body in parts:
        content += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return "data:image/png;base64," + base64.b64encode(content).decode()
