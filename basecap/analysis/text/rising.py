"""Where the held-out loss of an architecture rises again: later points would be compared at losses that it has left."""

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from basecap.analysis.text.draws import Curve
from basecap.analysis.text.losses import RunLosses

#: A rise of the held-out loss above its lowest value that counts, in nats: evaluation points scatter by less.
RISE = 0.01


def before_rises(
    curves: Mapping[tuple[str, int], Curve],
) -> tuple[dict[tuple[str, int], Curve], dict[str, float]]:
    """Return the curves up to where the held-out loss of their architecture is lowest, and after which tokens it rises.

    That is the median over the runs of an architecture, as one that diverged says nothing of the others.
    """
    kept, rises = dict(curves), {}
    for name in dict.fromkeys(name for name, _ in curves):
        own = {key: curve for key, curve in curves.items() if key[0] == name}
        longest = max((curve.trained for curve in own.values()), key=lambda trained: trained[-1])
        losses = np.median([np.interp(longest, curve.trained, curve.x[0]) for curve in own.values()], axis=0)
        lowest = int(np.argmin(losses))
        if losses[-1] - losses[lowest] >= RISE:
            rises[name] = float(longest[lowest])
            kept |= {key: _until(curve, rises[name]) for key, curve in own.items()}
    return kept, rises


def _until(curve: Curve, tokens: float) -> Curve:
    count = max(1, int(np.sum(curve.trained <= tokens)))
    return Curve(x=curve.x[:, :count], y=curve.y[..., :count], trained=curve.trained[:count])


def overfitting(
    own: list[tuple[RunLosses, Curve]], reference: list[tuple[RunLosses, Curve]]
) -> tuple[float, float] | None:
    """Return held-out minus training loss of both at equal training loss, the lowest that both have reached.

    Curves are those before any of them was cut. None where no training loss was recorded.
    """
    lowest = [np.mean([np.nanmin(run.training, initial=np.inf) for run, _ in group]) for group in (own, reference)]
    if not np.isfinite(lowest).all():
        return None
    loss = max(lowest)
    ours, theirs = (float(np.mean([_held_out(*pair, loss) for pair in group]) - loss) for group in (own, reference))
    return ours, theirs


def _held_out(run: RunLosses, curve: Curve, loss: ndarray) -> float:
    """Return the held-out loss of a run where its training loss first was `loss`."""
    known = np.isfinite(run.training)
    falling = np.minimum.accumulate(run.training[known])
    return float(np.interp(-loss, -falling, curve.x[0][known]))
