"""The figures of losses: on a domain over pre-training loss, and over tokens; runs of an architecture as one band."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Literal, TypeVar

import numpy as np
from numpy import ndarray

from basecap.analysis.results import CurvePoint, Point, TextResults
from basecap.report.figures.means import between, mean_and_band
from basecap.report.figures.spec import Rows, Spec, chart, layer, number, unless_picked
from basecap.report.figures.style import (
    ABSCISSAE,
    NATS,
    colour,
    compared_at,
    dash,
    extent,
    names_of,
    point_size,
    ref,
    reference_first,
    shape,
    stroke_width,
    tooltip,
    trained_band,
    trained_range,
)
from basecap.report.palette import GREY

#: Places at which the mean of runs is drawn: over the trained range, over a whole curve, over training.
WITHIN, WHOLE, STEPS = 13, 25, 80
#: Opacity of a band among many, which hide each other, and how many are a few.
FAINT, FEW = 0.06, 4
#: How far beyond the trained range a chart of it goes, in its widths.
MARGIN = 0.15

Abscissa = Literal["held_out", "training"]
#: What is drawn of a run.
Observed = TypeVar("Observed", Point, CurvePoint)


def scatter(study: TextResults, domain: str, abscissa: Abscissa, *, enlarged: bool) -> Spec | None:
    """Loss on one domain over pre-training loss: the mean of an architecture's runs, and a band from run to run.

    `enlarged` is the trained range alone, and nothing where there is none or the loss is not the one it is a range
    of; else the whole curve with the range shaded, and the line y = x.
    """
    found = _runs_of(study, study.points, attrgetter(abscissa), lambda point: point.loss_on(domain))
    within = trained_range(study) if abscissa == compared_at(study) else None
    if not found or (enlarged and within is None):
        return None
    first, last = _ends([run for runs in found.values() for run in runs])
    ends, count = extent([first, last]), WHOLE
    if enlarged and within is not None:
        margin = MARGIN * (within[1] - within[0])
        ends, count = [max(first, within[0] - margin), min(last, within[1] + margin)], WITHIN
    lines = [row for name, runs in found.items() for row in mean_and_band(name, runs, _spread(runs, ends, count))]
    if not lines:
        return None
    vertical = extent([end for row in lines for end in (row["low"], row["high"])])

    def x(field: str) -> Spec:
        return number(field, f"{ABSCISSAE[abscissa]} ({NATS})", {"domain": ends, "nice": False}, {"tickCount": 8})

    def y(field: str) -> Spec:
        return number(field, f"loss on {domain} ({NATS})", {"domain": vertical, "nice": False})

    behind = trained_band(study, x) if within is not None else []
    if not enlarged:
        same = [{"x": end, "loss": end} for end in (min(ends[0], vertical[0]), max(ends[1], vertical[1]))]
        line = {"type": "line", "clip": True, "strokeDash": [5, 4], "color": GREY}
        behind.append(layer(same, line, {"x": x("x"), "y": y("loss")}))
    marks = [row for name, runs in found.items() for row in mean_and_band(name, runs, _marked(runs, ends, count))]
    layers = _band_line_marks(study, lines, marks, x("x"), y, "x")
    title = f"{domain}, trained range" if enlarged else domain
    return chart([*behind, *layers], width=420, height=320, title=title, pick=True)


def training(study: TextResults) -> Spec | None:
    """Smoothed training loss (lines) and held-out loss on the training domains (marks) over tokens, means of runs."""
    curves = _runs_of(study, study.curves, attrgetter("tokens"), attrgetter("loss"))
    if not curves:
        return None
    steps = np.geomspace(*_ends([run for runs in curves.values() for run in runs]), STEPS).tolist()
    lines = [row for name, runs in curves.items() for row in mean_and_band(name, runs, steps)]
    tested = _runs_of(study, study.points, attrgetter("tokens"), attrgetter("held_out"))
    marks = [row for name, runs in tested.items() for row in mean_and_band(name, runs, _own_places(runs))]
    x = number("x", "tokens trained on", {"type": "log", "nice": False}, {"format": "~s", "grid": False})

    def y(field: str) -> Spec:
        return number(field, f"loss ({NATS})", {"zero": False})

    layers = _band_line_marks(study, lines, marks, x, y, "tokens")
    return chart(layers, width=480, height=320, title="training", pick=True)


def _runs_of(
    study: TextResults, rows: Sequence[Observed], x: Callable[[Observed], Any], y: Callable[[Observed], Any]
) -> dict[str, list[ndarray]]:
    """Return a curve [2, points] per run, in the order of x, by architecture in the study's order.

    `x` and `y` are read off the rows; those without one of them are left out.
    """
    values = np.array([list(map(read, rows)) for read in (x, y)], dtype=float)  # None is NaN
    runs: dict[tuple[str, int], list[int]] = {}
    for index, row in enumerate(rows):
        runs.setdefault((row.name, row.seed), []).append(index)
    by_name: dict[str, list[ndarray]] = {name: [] for name in names_of(study)}
    for (name, _), own in runs.items():
        curve = values[:, own]
        curve = curve[:, ~np.isnan(curve).any(0)]
        if curve.size:
            by_name[name].append(curve[:, np.lexsort(curve[::-1])])
    return {name: own for name, own in by_name.items() if own}


def _ends(runs: Sequence[ndarray]) -> tuple[float, float]:
    """Return where the first of some runs begins and the last one ends."""
    return min(float(run[0, 0]) for run in runs), max(float(run[0, -1]) for run in runs)


def _spread(runs: Sequence[ndarray], ends: Sequence[float], count: int) -> list[float]:
    """Return places from the first to the last point of some runs, within `ends`."""
    first, last = _ends(runs)
    low, high = max(first, ends[0]), min(last, ends[1])
    return np.unique(np.linspace(low, high, count)).tolist() if low <= high else []


def _marked(runs: Sequence[ndarray], ends: Sequence[float], count: int) -> list[float]:
    """Return where a curve has marks: at the points of a single run, else at no more places than a run has points."""
    if len(runs) > 1:
        return _spread(runs, ends, min(count, max(run.shape[1] for run in runs)))
    return [x for x in _own_places(runs) if ends[0] <= x <= ends[1]]


def _own_places(runs: Sequence[ndarray]) -> list[float]:
    """Return the places where an architecture was evaluated, WHOLE of them at most."""
    places = np.unique(np.concatenate([run[0] for run in runs]))
    return places[:: -(-len(places) // WHOLE)].tolist()


def _band_line_marks(
    study: TextResults,
    drawn: Rows,
    marks: Rows,
    x: Spec,
    y: Callable[[str], Spec],
    abscissa: str,
) -> list[Spec]:
    """Return a band for each architecture `drawn`, the mean as a line, and `marks`, whose x tooltips name."""
    drawn = reference_first(study, drawn)
    marked = [{**row, "between": between(row), abscissa: row["x"]} for row in reference_first(study, marks)]
    look = {"x": x, "color": colour(study, [*drawn, *marked])}
    several = [row for row in drawn if row["runs"] > 1]
    faint = FAINT if len({row["name"] for row in drawn}) > FEW else 3 * FAINT
    band = layer(
        several,
        {"type": "area", "clip": True},
        {**look, "y": y("low"), "y2": ref("high"), "opacity": unless_picked(faint, 0)},
    )
    line = layer(
        drawn,
        {"type": "line", "clip": True},
        {
            **look,
            "y": y("loss"),
            "strokeDash": dash(study, drawn),
            "strokeWidth": stroke_width(study, 1.6),
            "opacity": unless_picked(),
        },
    )
    point = layer(
        marked,
        {"type": "point", "clip": True, "filled": True},
        {
            **look,
            "y": y("loss"),
            "shape": shape(study, marked),
            "size": point_size(study, 40),
            "opacity": unless_picked(),
            "tooltip": tooltip("name", abscissa, "loss", "between"),
        },
    )
    return [*([band] if several else []), line, point]
