"""The charts stay readable whatever the intervals are: what is drawn, over which range, and what its legend names."""

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from basecap.analysis.results import AnswerRow, EvaluationResults, EvaluationRow, Point, PointLosses
from basecap.analysis.rows import DomainGap, GapPart
from basecap.report.charts import text_charts
from basecap.report.figures import evaluation, forest, gap_curve, parts, scatter
from basecap.report.images import image
from basecap.report.palette import BLACK, COLOURS, ON_DARK
from basecap.report.table_rows import numbers_of
from tests.report.made_up import TOLERANCE, gap, row, study


def seen(colour: str) -> np.ndarray:
    """Return where a colour stands in the space CIELAB, in which equal distances look about equally different."""
    levels = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    light = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt([[0.434, 0.376, 0.190], [0.213, 0.715, 0.072], [0.018, 0.109, 0.873]] @ light)
    return np.array([116 * y, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("dark", [False, True])
def test_no_two_colours_of_architectures_look_alike(dark):
    colours = [ON_DARK.get(colour, colour) if dark else colour for colour in (BLACK, *COLOURS)]
    places = [seen(colour) for colour in colours]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(places, 2)) > 20


def drawn_study(gaps, *, wide=3.0, narrow=0.1, skipped=()):
    """Return what the charts of gaps read: an unseen domain with narrow and one with wide intervals."""
    rows = [row(f"other {number}", value, narrow, wide=wide) for number, value in enumerate(gaps)]
    return study(*rows, skipped=skipped)


def layers(chart, kind):
    """Return mark, encoding and rows of a chart's layers of one kind."""
    return [
        (layer["mark"], layer["encoding"], chart["datasets"][layer["data"]["name"]])
        for layer in chart["layer"]
        if layer["mark"]["type"] == kind
    ]


def scale_and_ticks(encoding):
    low, high = encoding["scale"]["domain"]
    values, form = encoding["axis"]["values"], encoding["axis"]["format"]
    digits = int(form.strip(".~f"))
    return low, high, values, [f"{value:.{digits}f}" for value in values]


def test_one_wide_interval_leaves_room_for_the_others():
    rows = [row("a", 0.05, 0.1), row("b", -0.1, 0.1), row("wide", 0.0, 3.0)]
    mark, encoding, _ = layers(forest(study(*rows)), "rule")[-1]
    low, high, _, _ = scale_and_ticks(encoding["x"])
    assert mark["type"] == "rule" and -0.5 < low < -0.2 and 0.15 < high < 0.5


def test_arrowheads_stand_where_bars_are_cut_and_only_there():
    rows = [row("a", 0.05, 0.1), row("b", -0.1, 0.1), row("wide", 0.0, 3.0)]
    chart = forest(study(*rows))
    heads = [part["transform"] for part in chart["layer"] if "triangle" in part["mark"].get("shape", "")]
    assert heads == [[{"filter": "datum.low < datum.from"}], [{"filter": "datum.high > datum.to"}]]
    bars = layers(chart, "rule")[-1][2]
    low, high = layers(chart, "rule")[-1][1]["x"]["scale"]["domain"]
    assert len(bars) == 3 and all(low <= bar["from"] <= bar["alone_to"] <= bar["to"] <= high for bar in bars)
    assert [bar["name"] for bar in bars if bar["low"] < bar["from"] and bar["high"] > bar["to"]] == ["wide"]
    uncut = layers(forest(study(*rows[:2])), "rule")[-1][2]
    assert all((bar["low"], bar["high"]) == (bar["from"], bar["to"]) for bar in uncut)


def test_no_bar_touches_the_edge_without_an_arrowhead():
    rows = [row("a", 0.05, 0.1), row("b", -0.1, 0.1), row("wide", 0.0, 3.0)]
    rows[0] = replace(rows[0], gap=replace(rows[0].gap, high=0.42))
    low, high = layers(forest(study(*rows)), "rule")[-1][1]["x"]["scale"]["domain"]
    assert 0.44 < high < 0.5 and -0.5 < low < -0.4


def test_intervals_over_all_domains_are_not_all_cut():
    chart = forest(drawn_study([0.001, 0.002, 0.003], narrow=1.0))
    low, high = layers(chart, "rule")[-1][1]["x"]["scale"]["domain"]
    assert low < -0.9 and high > 0.9


@pytest.mark.parametrize("size", [0.0, 0.004, 0.17, 0.34, 40.0])
def test_zero_has_a_tick_and_labels_say_where_they_are(size):
    _, encoding, _ = layers(forest(drawn_study([size, -size / 3], narrow=size)), "rule")[0]
    low, high, values, labels = scale_and_ticks(encoding["x"])
    assert 0 in values and 3 <= len(values) <= 8
    assert all(low <= value <= high for value in values) and low < TOLERANCE < high
    assert [float(label) for label in labels] == pytest.approx(values)


@pytest.mark.parametrize(("count", "always"), [(3, True), (4, False)])
def test_bands_of_many_are_drawn_when_picked(count, always):
    chart = gap_curve(drawn_study([0.01 * number for number in range(count)]))
    (_, encoding, _) = layers(chart, "area")[0]
    condition = encoding["opacity"]["condition"]
    assert condition["test"].startswith("picked.length == 0") is always and encoding["opacity"]["value"] == 0


@pytest.mark.parametrize("count", [2, 13])
def test_lines_set_the_range_along_training(count):
    top = 0.1 * count
    (_, encoding, _) = layers(gap_curve(drawn_study([0.1 * (number + 1) for number in range(count)])), "line")[0]
    low, high = encoding["y"]["scale"]["domain"]
    assert top < high < 4 * top and -4 * top < low < 0


def test_legends_name_what_is_drawn():
    drawn = drawn_study([0.1, 0.2], skipped=["failed"])
    (_, encoding, _) = layers(gap_curve(drawn), "line")[0]
    assert encoding["color"]["legend"]["values"] == ["other 0", "other 1"]
    assert encoding["strokeDash"]["legend"] == encoding["color"]["legend"]
    assert encoding["color"]["scale"]["domain"] == ["base", "other 0", "other 1", "failed"]
    assert all(encoding["color"]["legend"] is None for _, encoding, _ in layers(forest(drawn), "point"))


def test_an_architecture_has_one_colour_in_every_chart():
    some = drawn_study([0.1, 0.2, 0.3])
    common = {"eval": "e", "subset": "s", "metric": "m", "value": 0.5, "stderr": 0.1, "n": 1, "axis": {}}
    rows = [EvaluationRow(name="other 1", seed=seed, step=1, tokens=1, **common) for seed in (0, 1, 2)]
    found = EvaluationResults(name="e", axes=[], unit="accuracy", better="higher", rows=rows)
    one = evaluation(some, found, "m", None)
    (_, encoding, _) = layers(one, "point")[0]
    assert encoding["color"]["scale"] == layers(gap_curve(some), "line")[0][1]["color"]["scale"]
    assert encoding["color"]["legend"]["values"] == ["other 1"]
    assert one["height"] < 40, "seeds of an architecture share a row"


def test_numbers_on_a_terminal_are_means_over_the_runs_of_an_architecture():
    common = {"step": 1, "tokens": 1, "eval": "e", "subset": "s", "stderr": None, "n": 1}
    rows = [
        EvaluationRow(name="a", seed=seed, metric=metric, value=value, axis={"length": length}, unit=unit, **common)
        for seed, metric, value, length, unit in [
            (0, "m", 1.0, 8.0, None),
            (0, "lag", 2.0, 8.0, "tokens"),
            (1, "m", 4.0, 8.0, None),
            (1, "m", None, 16.0, None),
        ]
    ]
    found = EvaluationResults(name="e", axes=["length"], unit="share", better="neither", rows=rows)
    assert numbers_of(found) == [
        {"architecture": "a", "runs": 2, "subset": "s", "length": 8.0, "m (share)": 2.5, "lag (tokens)": 2.0},
        {"architecture": "a", "runs": 1, "subset": "s", "length": 16.0, "m (share)": None},
    ]


WHOLE = {"format": ",d", "tickMinStep": 1}


@pytest.mark.parametrize(
    ("places", "kind", "form"),
    [
        ((256, 512, 102400), "log", WHOLE),
        ((1, 2, 12), None, WHOLE),
        ((0, 64, 128), None, WHOLE),
        ((0, 0.5, 1), None, {}),
    ],
    ids=str,
)
def test_positions_that_double_stand_at_equal_distances(places, kind, form):
    common = {"eval": "e", "subset": "s", "metric": "m", "value": 0.5, "stderr": 0.1, "n": 1, "step": 1, "tokens": 1}
    rows = [EvaluationRow(name="other 0", seed=0, axis={"position": place}, **common) for place in places]
    found = EvaluationResults(name="e", axes=["position"], unit="nats", better="lower", rows=rows)
    chart = evaluation(drawn_study([0.1]), found, "m", "s")
    assert chart["title"] == "e, s"
    encodings = [layer["encoding"]["x"] for layer in chart["layer"]]
    assert {encoding["scale"].get("type") for encoding in encodings} == {kind}
    assert all(encoding["axis"] == {"values": list(places)} | form for encoding in encodings)


def test_answers_by_two_axes_are_a_heat_map_and_no_curve():
    common = {"name": "other 0", "step": 1, "tokens": 1, "eval": "e", "metric": "m", "stderr": 0.1, "n": 50}
    rows = [
        AnswerRow(subset=f"d {depth}", seed=seed, axis=axis, value=value, low=0.0, high=1.0, **common)
        for seed, values in enumerate([(0.2, 0.4, 1.0), (0.4, 0.4, 1.0)])
        for depth, length, value in zip((2, 1, 1), (9000.0, 9000.0, 100.0), values, strict=True)
        for axis in [{"length": length, "depth": float(depth)}]
    ]
    whole = AnswerRow(subset="all", seed=0, axis={"length": 100.0}, value=0.0, low=0.0, high=0.07, **common)
    found = EvaluationResults(name="e", axes=["length"], unit="share", better="higher", rows=[*rows, whole])
    drawn = replace(drawn_study([0.1]), evaluations=[found])
    charts = text_charts(drawn)
    assert [name for name, chart in charts["heat_maps"].items() if chart] == ["e-other 0"]
    assert [*charts["evaluations"]] == ["e-m-all"]
    chart = charts["heat_maps"]["e-other 0"]
    assert b"e, right answers in %" in image(chart, "svg")
    _, encoding, cells = layers(chart, "rect")[0]
    assert (encoding["x"]["sort"], encoding["y"]["sort"]) == (["100", "9,000"], ["d 1", "d 2"])
    values = {(cell["place"], cell["subset"]): cell["value"] for cell in cells}
    assert values == {("9,000", "d 2"): pytest.approx(0.3), ("9,000", "d 1"): 0.4, ("100", "d 1"): 1.0}
    assert all(cell["low"] < cell["value"] or cell["value"] < cell["high"] for cell in cells)
    (bar,) = layers(charts["evaluations"]["e-m-all"], "rule")[0][2]
    assert (bar["low"], bar["high"]) == (0.0, 0.07)


def test_every_gap_has_its_own_tolerance_beside_it():
    rows = [row("a", 0.05, 0.1), row("b", 0.2, 0.1)]
    other = DomainGap(domain="arxiv", **vars(gap(0.05, 0.1, tolerance=0.07)))
    rows[0] = replace(rows[0], domains=(other, *rows[0].domains[1:]))
    for domain, expected in ((None, TOLERANCE), ("arxiv", 0.07), ("github", TOLERANCE)):
        ((_, _, ticks),) = layers(forest(study(*rows), domain), "tick")
        assert {tick["name"]: tick["tolerance"] for tick in ticks} == {"a": expected, "b": TOLERANCE}
    assert not layers(forest(study(*rows, mixed=True)), "tick")


def test_the_trained_range_is_shaded_and_lines_are_thick_in_it():
    rows = [row("a", 0.05, 0.1), replace(row("b", 0.2, 0.1), range=(3.35, 3.6))]
    chart = gap_curve(study(*rows))
    _, (_, _, band) = layers(chart, "rect")  # behind it the transition of the reference
    assert (band[0]["low"], band[0]["high"]) == (3.2, 3.6)
    (_, thick) = [layer for layer in chart["layer"] if layer["mark"]["type"] == "line"]
    assert thick["mark"]["strokeWidth"] > 3 and thick["transform"] == [{"filter": "datum.trained"}]
    (_, _, places) = layers(chart, "line")[0]
    assert [place["loss"] for place in places if place["trained"]] == [3.4, 3.4]


def test_without_a_variance_of_runs_lines_have_no_band():
    one = row("a", 0.05, 0.1)
    chart = gap_curve(study(replace(one, along=replace(one.along, low=None, high=None))))
    assert layers(chart, "line") and not layers(chart, "area")


@pytest.mark.parametrize("mixed", [False, True])
def test_the_trained_range_is_shaded_over_the_loss_that_it_is_a_range_of(mixed):
    points = [
        Point(
            name="a",
            seed=seed,
            step=1,
            tokens=10,
            held_out=x,
            training=x + 0.1,
            domains={"arxiv": PointLosses(loss=y, bits_per_byte=None)},
        )
        for seed, shift in ((0, 0.0), (1, 0.2), (2, 0.1))
        for x, y in ((3.1, 4.0 + shift), (3.5, 5.0 + shift), (6.0, 8.0 + shift))
    ]
    drawn = study(row("a", 0.05, 0.1), mixed=mixed, points=points)
    main, other = ("training", "held_out") if mixed else ("held_out", "training")
    whole, wrong, close = (
        scatter(drawn, "arxiv", abscissa, enlarged=enlarged)
        for abscissa, enlarged in ((main, False), (other, False), (main, True))
    )
    assert layers(whole, "rect") and layers(close, "rect") and not layers(wrong, "rect")
    assert scatter(drawn, "arxiv", other, enlarged=True) is None
    ((_, encoding, means),) = layers(close, "point")
    low, high = encoding["x"]["scale"]["domain"]
    assert 3.1 <= low <= 3.2 and 3.6 < high < 3.7 and len(means) < 15
    assert all(mean["low"] + 0.1 == pytest.approx(mean["loss"]) == mean["high"] - 0.1 for mean in means)
    one = study(row("a", 0.05, 0.1), mixed=mixed, points=points[:1])
    assert [mean["between"] for mean in layers(scatter(one, "arxiv", main, enlarged=False), "point")[0][2]] == [
        "one run"
    ]


def test_the_reference_is_seen_where_curves_coincide():
    points = [
        Point(
            name=name,
            seed=0,
            step=1,
            tokens=10,
            held_out=x,
            training=x,
            domains={"arxiv": PointLosses(loss=x + 1, bits_per_byte=None)},
        )
        for name in ("a", "base")
        for x in (3.1, 3.4, 3.6)
    ]
    chart = scatter(study(row("a", 0.0, 0.1), points=points), "arxiv", "held_out", enlarged=False)
    drawn = image(chart, "svg").decode()
    widths = re.findall(r'aria-roledescription="line mark".*?stroke="(#\w+)" stroke-width="([\d.]+)"', drawn)
    _, (first, own), (second, other) = widths
    assert (first, second) == (BLACK, COLOURS[0]), "the reference is drawn first, what lies on it after it"
    assert float(own) > 2 * float(other)
    marks = re.findall(r'aria-roledescription="point".*?d="M(\S+?),.*?" fill="(#\w+)"', drawn)
    assert [colour for _, colour in marks] == [BLACK] * 3 + [COLOURS[0]] * 3
    assert float(marks[0][0]) > 1.5 * abs(float(marks[-1][0])), "its marks are larger"


def test_a_chart_is_written_as_pdf_and_its_whole_lines_have_no_dashes():
    """PDF viewers show seams in a line of dashes without spaces."""
    chart = gap_curve(drawn_study([0.1]))
    assert image(chart, "pdf").startswith(b"%PDF-")
    dashes = re.findall(rb'stroke-dasharray="(.*?)"', image(chart, "svg"))
    assert dashes and set(dashes) == {b""}


def test_the_transition_of_the_reference_is_shaded_over_losses_and_over_tokens():
    """From 10M to 20M tokens, between losses 4.0 after 10M and 3.4 after 30M, by the logarithm of tokens."""
    several = study(row("a", 0.05, 0.1), row("b", 0.2, 0.1))
    for axis, low, high in (("tokens", 1e7, 2e7), ("loss", 4.0, 4.0 - 0.6 * np.log(2) / np.log(3))):
        _, encoding, (band,) = layers(gap_curve(several, axis), "rect")[0]
        assert [band["low"], band["high"]] == pytest.approx([low, high])
        assert encoding["x"]["scale"].get("type") == ("log" if axis == "tokens" else None)
        assert band["label"] == "base learns to copy"
    young = replace(several, maturity=replace(several.maturity, passed=None))
    assert layers(gap_curve(young, "tokens"), "rect")[0][2][0]["high"] == pytest.approx(6e7)
    unknown = replace(several, maturity=replace(several.maturity, started=None))
    assert len(layers(gap_curve(unknown), "rect")) == 1


def test_the_parts_of_a_gap_stand_to_both_sides_of_zero_and_end_at_their_sum():
    values = {"copied": 0.3, "misled": -0.05, "new": -0.1}
    found = tuple(
        GapPart(name=name, value=value, low=None, high=None, tokens=1 / 3, share=None) for name, value in values.items()
    )
    chart = parts(study(replace(row("a", 0.15, 0.1), parts=found), row("b", 0.1, 0.1)))
    (_, _, bars), (_, _, dots) = (*layers(chart, "bar"), *layers(chart, "point"))
    assert [bar["from"] for bar in bars] == pytest.approx([0, 0, -0.05])
    assert [bar["to"] for bar in bars] == pytest.approx([0.3, -0.05, -0.15])
    assert [(dot["name"], dot["value"]) for dot in dots] == [("a", 0.15)]
    assert parts(study(row("b", 0.1, 0.1))) is None
