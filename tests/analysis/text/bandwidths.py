"""Which bandwidth fits curves best: `python -m tests.analysis.text.bandwidths DIR [TOKENS]`.

For each bandwidth, in widths of the trained range, it prints how well the fit predicts points that it was not given
(the root of the mean square over all runs, of the mean over unseen domains), and the gap of each architecture. Two
other fits are beside it: lines from point to point, and a parabola through the points near the range.
"""

import sys
from pathlib import Path

import numpy as np

from basecap.analysis.text import gap
from basecap.analysis.text.curve import fitted
from basecap.analysis.text.draws import Curve
from tests.analysis.text.noise_by_tokens import curves_of

BANDWIDTHS = (2.0, 1.0, 0.7, 0.5, 0.35, 0.25)


def near(curve: Curve, where: gap.Range) -> tuple[np.ndarray, np.ndarray]:
    """Return places in the range, 0 at its low end and 1 at its high one, and losses of a run's points near it."""
    x, y = (curve.x[0] - where.low[0]) / where.width[0], curve.y[:, 0].mean(0)
    kept = (x >= -gap.REACH) & (x <= 1 + gap.REACH)
    return x[kept], y[kept]


def left_out(curve: Curve, where: gap.Range, bandwidth: float) -> list[float]:
    """Return the errors of the fit at each point near the range, predicted from the run's other points."""
    x, y = (curve.x[0] - where.low[0]) / where.width[0], curve.y[:, 0].mean(0)
    errors = []
    for place in np.flatnonzero((x > 0) & (x < 1)):
        others = np.arange(len(x)) != place
        predicted = fitted(x[others][None], y[others][None, None], x[place : place + 1], bandwidth)[0, 0, 0]
        errors.append(float(predicted - y[place]))
    return errors


def levels(curve: Curve, where: gap.Range) -> list[float]:
    """Return the mean over the range by each bandwidth, by lines from point to point, and by a parabola."""
    x, y = (curve.x[0] - where.low[0]) / where.width[0], curve.y[:, 0].mean(0)
    found = [float(fitted(x[None], y[None, None], gap.PLACES, bandwidth).mean()) for bandwidth in BANDWIDTHS]
    order = np.argsort(x)
    found.append(float(np.interp(gap.PLACES, x[order], y[order]).mean()))
    found.append(float(np.polyval(np.polyfit(*near(curve, where), 2), gap.PLACES).mean()))
    return found


def main() -> None:
    """Print a row of prediction errors, then a row per architecture."""
    found, reference, _ = curves_of(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else None)
    theirs = found[reference]
    high = gap.upper_end(theirs, 0.5, None)
    print("", *(f"bandwidth {width:g}" for width in BANDWIDTHS), "lines", "parabola", sep="\t")
    errors: dict[float, list[float]] = {bandwidth: [] for bandwidth in BANDWIDTHS}
    rows = []
    for name, runs in found.items():
        where = gap.Range(low=np.maximum(gap.final(theirs), gap.final(runs)), high=high)
        if not (where.low < where.high).all():
            continue
        for bandwidth in BANDWIDTHS:
            errors[bandwidth] += [error for curve in runs for error in left_out(curve, where, bandwidth)]
        own, base = (np.mean([levels(curve, where) for curve in group], axis=0) for group in (runs, theirs))
        if name != reference:
            rows.append((name, own - base))
    square = {bandwidth: np.sqrt(np.mean(np.square(own))) for bandwidth, own in errors.items()}
    print("error of a point left out", *(f"{square[bandwidth]:.4f}" for bandwidth in BANDWIDTHS), sep="\t")
    for name, gaps in rows:
        print(name, *(f"{value:+.3f}" for value in gaps), sep="\t")


if __name__ == "__main__":
    main()
