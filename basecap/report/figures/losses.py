"""The figures of losses: on a domain over pre-training loss, and over tokens; runs of an architecture as one band."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from basecap.report.figures.look import (
    ABSCISSAE,
    NATS,
    Chart,
    Rows,
    Study,
    chart_of,
    colour,
    compared_at,
    dash,
    drawn,
    extent,
    names_of,
    picked,
    shape,
    tooltip,
    trained_band,
    trained_range,
    unless_picked,
)
from basecap.report.figures.means import Points, mean_and_band
from basecap.report.palette import GREY

#: Places at which the mean of runs is drawn: over the trained range, over a whole curve, over training.
WITHIN, WHOLE, STEPS = 13, 25, 80
#: Opacity of a band among many, which hide each other, and how many are a few.
FAINT, FEW = 0.06, 4
#: How far beyond the trained range a chart of it goes, in its widths.
MARGIN = 0.15


def scatter(study: Study, domain: str, abscissa: str, *, enlarged: bool) -> Chart | None:
    """Loss on one domain over pre-training loss: the mean of an architecture's runs, and a band from run to run.

    `enlarged` is the trained range alone, and nothing where there is none or the loss is not the one it is a range
    of; else the whole curve with the range shaded, and the line y = x.
    """
    found = {
        name: [[(point[abscissa], point["domains"][domain]["loss"]) for point in run] for run in runs]
        for name, runs in _runs_of(study, study["points"], lambda row: _tested(row, domain, abscissa)).items()
    }
    within = trained_range(study) if abscissa == compared_at(study) else None
    if not found or (enlarged and within is None):
        return None
    every = [x for runs in found.values() for run in runs for x, _ in run]
    ends, count = extent(every), WHOLE
    if enlarged and within is not None:
        margin = MARGIN * (within[1] - within[0])
        ends, count = [max(min(every), within[0] - margin), min(max(every), within[1] + margin)], WITHIN
    rows = [row for name, runs in found.items() for row in mean_and_band({name: runs}, _spread(runs, ends, count))]
    if not rows:
        return None
    vertical = extent([row[key] for row in rows for key in ("low", "high")])

    def x(field: str) -> alt.X:
        scale = alt.Scale(domain=ends, nice=False)
        return alt.X(f"{field}:Q", scale=scale, title=f"{ABSCISSAE[abscissa]} ({NATS})")

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", scale=alt.Scale(domain=vertical, nice=False), title=f"loss on {domain} ({NATS})")

    behind = trained_band(study, x) if within is not None else []
    if not enlarged:
        same = [{"x": end, "loss": end} for end in (min(ends[0], vertical[0]), max(ends[1], vertical[1]))]
        line = chart_of(same).mark_line(clip=True, strokeDash=[5, 4], color=GREY)
        behind.append(line.encode(x=x("x"), y=y("loss")))
    layers = _band_line_marks(study, rows, x("x"), y, [row | {"between": _between(row)} for row in rows])
    title = f"{domain}, trained range" if enlarged else domain
    return alt.layer(*behind, *layers).properties(width=420, height=320, title=title)


def training(study: Study) -> Chart | None:
    """Smoothed training loss (lines) and held-out loss on the training domains (marks) over tokens, means of runs."""
    curves = {
        name: [[(row["tokens"], row["loss"]) for row in run] for run in runs]
        for name, runs in _runs_of(study, study["curves"], lambda row: row["loss"] is not None).items()
    }
    if not curves:
        return None
    tokens = [x for runs in curves.values() for run in runs for x, _ in run]
    rows = mean_and_band(curves, np.geomspace(min(tokens), max(tokens), STEPS).tolist())
    tested = {
        name: [[(point["tokens"], point["held_out"]) for point in run] for run in runs]
        for name, runs in _runs_of(study, study["points"], lambda row: row["held_out"] is not None).items()
    }
    marks = _at_own_places(tested)
    scale, axis = alt.Scale(type="log", nice=False), alt.Axis(format="~s", grid=False)
    x = alt.X("x:Q", scale=scale, axis=axis, title="tokens")

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", scale=alt.Scale(zero=False), title=f"loss ({NATS})")

    layers = _band_line_marks(
        study, rows, x, y, [row | {"tokens": row["x"], "between": _between(row)} for row in marks]
    )
    return alt.layer(*layers).properties(width=480, height=320)


def _tested(row: dict[str, Any], domain: str, abscissa: str) -> bool:
    return row[abscissa] is not None and row["domains"].get(domain, {}).get("loss") is not None


def _runs_of(study: Study, rows: Rows, kept: Any) -> dict[str, list[Rows]]:
    """Return the rows of each run that are `kept`, by architecture in the order of the study."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if kept(row):
            runs.setdefault((row["name"], row["seed"]), []).append(row)
    by_name: dict[str, list[Rows]] = {name: [] for name in names_of(study)}
    for (name, _), own in runs.items():
        by_name[name].append(own)
    return {name: own for name, own in by_name.items() if own}


def _spread(runs: Sequence[Points], ends: Sequence[float], count: int) -> list[float]:
    """Return places from the first to the last point of some runs, within `ends`."""
    every = [x for run in runs for x, _ in run]
    low, high = max(min(every), ends[0]), min(max(every), ends[1])
    return np.unique(np.linspace(low, high, count)).tolist() if low <= high else []


def _at_own_places(curves: Mapping[str, Sequence[Points]]) -> list[dict[str, Any]]:
    """Return the means over runs at the places where an architecture was evaluated, WHOLE of them at most."""
    rows = []
    for name, runs in curves.items():
        places = sorted({x for run in runs for x, _ in run})
        rows += mean_and_band({name: runs}, places[:: -(-len(places) // WHOLE)])
    return rows


def _between(row: dict[str, Any]) -> str:
    return f"{row['low']:.3f} … {row['high']:.3f} ({row['runs']} runs)" if row["runs"] > 1 else "one run"


def _band_line_marks(
    study: Study, rows: Rows, x: alt.X, y: Callable[[str], alt.Y], marked: Rows
) -> Sequence[alt.Chart]:
    """Return a band for each architecture of `rows`, the mean as a line, and a mark for each row of `marked`."""
    look = {"x": x, "color": colour(study, [*rows, *marked])}
    several = [row for row in rows if row["runs"] > 1]
    bands = chart_of(several).mark_area(clip=True, tooltip=None)
    bands = bands.encode(**look, y=y("low"), y2="high:Q")
    lines = chart_of(rows).mark_line(clip=True, strokeWidth=1.6)
    lines = lines.encode(**look, y=y("loss"), strokeDash=dash(study, rows), opacity=unless_picked())
    place = "tokens" if any("tokens" in row for row in marked) else "x"
    marks = chart_of(marked).mark_point(clip=True, filled=True, size=40)
    marks = marks.encode(
        **look,
        y=y("loss"),
        shape=shape(study, marked),
        opacity=unless_picked(),
        tooltip=tooltip("name", place, "loss", "between"),
    )
    return [
        *(
            [bands.encode(opacity=unless_picked(FAINT if len(drawn(study, rows)) > FEW else 3 * FAINT, 0))]
            if several
            else []
        ),
        lines,
        marks.add_params(picked()),
    ]
