"""Heat maps of what layers read: their pixels, where they stand, and whose are drawn."""

import base64
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import vl_convert

from basecap.analysis.results import EvaluationResults, EvaluationRow, TextResults
from basecap.errors import DataError
from basecap.records import StudyRecords
from basecap.records.maps import Maps
from basecap.report import figures
from basecap.report.charts import influence_charts
from basecap.report.palette import ON_DARK
from tests.report import made_up
from tests.report.made_up import run_row

SIZES = np.stack([np.eye(3), np.full((3, 3), 0.25), np.tri(3)]).astype(np.float16)
MAPS = Maps(input="prose", tokens=3, layers=np.array([0, 1, 5]), largest=np.ones(3), sizes=SIZES)


def pixels(url: str) -> np.ndarray:
    """Return the greys of a picture of 3 x 3 elements."""
    grey = greys(url)
    height, width = grey.shape
    assert width == height >= 140
    each = grey[:: height // 3, :: width // 3]
    assert np.array_equal(grey, each.repeat(height // 3, axis=0).repeat(width // 3, axis=1))
    return each


def greys(url: str) -> np.ndarray:
    """Return the greys of a PNG of 8 bits without filters."""
    content = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    parts, place = {}, 8
    while place < len(content):
        (size,), kind = struct.unpack(">I", content[place : place + 4]), content[place + 4 : place + 8]
        body, check = content[place + 8 : place + 8 + size], content[place + 8 + size : place + 12 + size]
        assert struct.unpack(">I", check) == (zlib.crc32(kind + body),)
        parts[kind], place = body, place + 12 + size
    width, height = struct.unpack(">II", parts[b"IHDR"][:8])
    return np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, width + 1)[:, 1:]


def tiles(chart) -> list[dict]:
    return next(iter(chart["datasets"].values()))


def test_each_layer_is_a_picture_of_its_own_with_its_score():
    chart = figures.influence("mine, seed 0", MAPS, {1: 0.5})
    (text,) = [layer["mark"] for layer in chart["layer"] if layer["mark"]["type"] == "text"]
    assert text["color"] in ON_DARK  # it stands on the page itself
    rows = tiles(chart)
    assert [row["title"] for row in rows] == ["layer 0", "layer 1, selectivity 0.50", "layer 5"]
    assert np.array_equal(pixels(rows[0]["url"]), 255 - 255 * np.eye(3))
    assert (pixels(rows[1]["url"]) == 128).all()  # the square root of 1/4 is half black
    assert pixels(rows[2]["url"])[0].tolist() == [0, 255, 255]


def test_pairs_are_marked_and_large_matrices_are_drawn_in_fewer_pixels():
    sizes = np.zeros((1, 280, 280), np.float16)
    sizes[0, 201, 3] = 1
    asked = np.array([[5, 3]])
    maps = replace(MAPS, tokens=280, layers=np.array([7]), sizes=sizes, keys=asked[0, 1:] - 1, asked=asked)
    tiles, marks = figures.influence("mine", maps, {})["datasets"].values()
    assert [(mark["mark"], mark["left"], mark["top"] - tiles[0]["top"]) for mark in marks] == [
        ("key", 1.25, -4),
        ("row that has to give the value of this column", 1.75, 2.75),
    ]
    grey = greys(tiles[0]["url"])
    assert grey.shape == (140, 140) and np.argwhere(grey == 0).tolist() == [[100, 1]]


def test_layers_fill_rows_of_four_and_do_not_overlap():
    count = 10
    many = Maps(input="", tokens=3, layers=np.arange(count), largest=np.ones(count), sizes=SIZES[:1].repeat(count, 0))
    chart = figures.influence("mine", many, {})
    boxes = [(row["left"], row["top"], row["right"], row["bottom"]) for row in tiles(chart)]
    assert len({top for _, top, _, _ in boxes}) == 3 and len({left for left, *_ in boxes}) == 4
    for index, (left, top, right, bottom) in enumerate(boxes):
        assert 0 <= left < right <= chart["width"] and 0 <= top < bottom <= chart["height"]
        for x, y, _, _ in boxes[index + 1 :]:
            assert x >= right or y >= bottom or x < left


def study() -> TextResults:
    scores = [
        EvaluationRow(name="mine", seed=seed, step=1, tokens=1, eval="selectivity", subset=layer, metric=metric,
                      value=value, n=1, stderr=None, axis={})
        for seed, metric, layer, value in ((1, "signed_score", "layer 5", 0.25), (0, "signed_score", "layer 5", 0.75),
                                           (1, "mass", "layer 0", 0.1))
    ]  # fmt: skip
    selectivity = EvaluationResults(name="selectivity", unit="share", better="higher", axes=[], rows=scores)
    runs = [run_row(name, seed) for name, seed in (("mine", 0), ("mine", 1), ("mine", 2), ("other", 0))]
    return made_up.study(runs=runs, evaluations=[selectivity])


def test_the_first_run_that_has_maps_is_drawn_at_its_last_step(tmp_path):
    records = StudyRecords(tmp_path)
    older = Maps(input="older", tokens=3, layers=MAPS.layers, largest=MAPS.largest, sizes=SIZES)
    records.run("mine", 1).write_maps("influence-map", 9, older)
    records.run("mine", 1).write_maps("influence-map", 10, MAPS)
    records.run("mine", 2).write_maps("influence-map", 10, MAPS)
    charts = influence_charts(study(), records)["influence"]
    assert list(charts) == ["influence-mine-influence-map"]
    chart = charts["influence-mine-influence-map"]
    assert chart["title"] == "mine, seed 1: prose, 3 tokens"
    assert [row["title"] for row in tiles(chart)][2] == "layer 5, selectivity 0.25"
    picture = vl_convert.vegalite_to_svg(chart, vl_version=figures.VEGA_LITE)
    assert picture.count("data:image/png;base64,") == 3 and "selectivity 0.25" in picture


def test_damaged_maps_are_named(tmp_path):
    path = tmp_path / "runs" / "mine-s0" / "maps" / "influence-map-10.npz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match="influence-map-10"):
        influence_charts(study(), StudyRecords(tmp_path))


def test_numbers_of_layers_are_a_heat_map():
    common = {"seed": 0, "step": 2, "tokens": 1, "eval": "e", "metric": "m", "n": 4, "axis": {}}
    rows = [
        EvaluationRow(name=name, subset=f"layer {layer}", value=value, stderr=0.1, **common)
        for name, layer, value in (("a", 0, -0.2), ("a", 10, 0.4), ("b", 0, 0.1))
    ]
    rows.append(replace(rows[0], seed=1, value=0.4))
    found = EvaluationResults(name="e", axes=[], unit="share", better="neither", rows=rows)
    assert figures.has_layers(found) and not figures.has_layers(replace(found, rows=[replace(rows[0], subset="all")]))
    chart = figures.layers(found, "m", ["b", "a", "c"])
    assert {(row["run"], row["layer"], row["text"]) for row in tiles(chart)} == {
        ("a", 0, "0.10"),
        ("a", 10, "0.40"),
        ("b", 0, "0.10"),
    }
    assert next(row["stderr"] for row in tiles(chart) if row["run"] == "a") == pytest.approx(0.1 / 2**0.5)
    x, y = (chart["layer"][0]["encoding"][axis]["scale"]["domain"] for axis in "xy")
    assert (x, y) == ([0, 10], ["b", "a"]) and figures.layers(found, "other", ["a"]) is None
    scores = replace(found, rows=[replace(row, unit="from -1 to 1") for row in rows])
    for one, unit, far in ((found, "share", 0.4), (scores, "from -1 to 1", 1.0)):
        chart = figures.layers(one, "m", ["a"])
        assert chart["title"]["subtitle"] == unit
        assert chart["layer"][0]["encoding"]["color"]["scale"]["domain"] == [-far, 0, far]
