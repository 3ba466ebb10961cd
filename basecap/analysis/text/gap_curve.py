"""The gap along the whole range of losses: a picture, with a band at each place."""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from basecap.analysis.rows import GapCurve
from basecap.analysis.text.draws import Curve
from basecap.analysis.text.gap import read_off
from basecap.analysis.text.noise import Shared

#: Places of the picture, and draws of documents behind its band, after the sample itself.
PLACES, FIRST = 24, slice(51)
#: Bandwidth of the curves, in ranges.
BANDWIDTH = 0.2


def gap_curve(
    curves: Sequence[Curve], reference: Sequence[Curve], weights: ndarray, shared: Shared | None, reach: float
) -> GapCurve:
    """Return the gap of `curves` at places over the range of losses that they and the reference's have both seen.

    The band reaches as many standard errors, `reach`, as the interval of this row alone does over the trained range; it
    holds at each place for itself. There is no interval without a variance of runs.
    """
    groups = (curves, reference)
    low = max(np.mean([curve.x[0].min() for curve in group]) for group in groups)
    high = min(np.mean([curve.x[0].max() for curve in group]) for group in groups)
    places = low + (high - low) * (np.arange(PLACES) + 0.5) / PLACES
    ours, theirs = (
        np.stack([read_off(curve.of(FIRST), places, BANDWIDTH * (high - low)) @ weights for curve in group])
        for group in groups
    )
    values = ours.mean(0) - theirs.mean(0)
    band = None
    if shared is not None:
        variance = values[1:].var(axis=0) + sum(
            shared.moderate(_variances(part), len(part) - 1) / len(part) for part in (ours, theirs)
        )
        band = reach * np.sqrt(variance)
    return GapCurve(
        loss=places.tolist(),
        tokens=_tokens_at(places, reference),
        value=values[0].tolist(),
        low=None if band is None else (values[0] - band).tolist(),
        high=None if band is None else (values[0] + band).tolist(),
    )


def _tokens_at(losses: ndarray, reference: Sequence[Curve]) -> list[float]:
    """Return the tokens after which the reference has these losses, a mean over its runs (of logarithms)."""
    places = []
    for curve in reference:
        lowest = np.minimum.accumulate(curve.x[0])  # a loss that it had before counts where it was first
        places.append(np.interp(-losses, -lowest, np.log(curve.trained)))
    return [*map(float, np.exp(np.mean(places, axis=0)))]


def _variances(levels: ndarray) -> ndarray:
    """Return the variance over runs at each place, [G], of levels [n, R + 1, G]; zero for a single run."""
    return levels[:, 0].var(axis=0, ddof=1) if len(levels) > 1 else np.zeros(levels.shape[-1])
