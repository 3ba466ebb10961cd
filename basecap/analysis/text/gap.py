"""The gap: how much worse out of domain than the reference trained models are, at equal pre-training loss.

Every evaluation point is a pair: x the loss on held-out text of the training domains, y the loss on a domain never
trained on. The *trained range* of x begins, from above, where the reference is after a share of its tokens, and never
above the loss of a bigram model of the training text; it ends at the higher of the two final mean losses. Each run
gives one number: the mean of its fitted curve y(x) over that range. The gap is the difference between the means of
those numbers over the runs of an architecture and over the runs of the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.text.curve import fitted, smoother
from basecap.analysis.text.draws import Curve

#: Places over the trained range at which a curve is read off, in its widths: the midpoints of cells.
PLACES = (np.arange(16) + 0.5) / 16
#: What each place counts for in the mean over the range, and in the drift: how much higher a curve is over the half of
#: lower losses, which comes later, than over the other half.
MEAN = np.full(len(PLACES), 1 / len(PLACES))
DRIFT = np.where(PLACES < 0.5, 2.0, -2.0) / len(PLACES)
#: The mean over the next range, as wide as this one, if the drift goes on: the halves lie half a range apart.
NEXT = MEAN + 2 * DRIFT
#: Evaluation points that an architecture needs within reach of the trained range, in every run.
FEWEST_POINTS = 4
#: Bandwidth of the fitted curve, in widths of the range; it reaches so far beyond both ends. With twice as much, as far
#: as the whole range, gaps that end a transition are off by up to 0.02 nats (results/intervals).
REACH = 0.5
#: Largest share of draws that may lose the trained range before the interval would mislead.
LOST_DRAWS = 0.05
#: A loss that needs more than so many times the tokens of a run is not worth waiting for.
LONGEST = 100.0


@dataclass(frozen=True)
class Range:
    """The trained range in each draw: `low` and `high`, [R + 1]; row 0 is the sample itself."""

    low: ndarray
    high: ndarray

    @property
    def width(self) -> ndarray:
        """Its width in each draw, NaN where it is empty."""
        return np.where(self.low < self.high, self.high - self.low, np.nan)


def upper_end(reference: Sequence[Curve], share: float, bigram: float | None) -> ndarray:
    """Return the mean loss of the reference's runs after `share` of its tokens, at most that of a bigram model."""
    target = share * max(curve.trained[-1] for curve in reference)
    high = np.mean([_at_tokens(curve, target) for curve in reference], axis=0)
    return high if bigram is None else np.minimum(high, bigram)


def middle(runs: Sequence[Curve], share: float) -> float:
    """Return the loss of the median run after `share` of the tokens: one that ends above it has diverged.

    The median, as a run that diverged moves a mean. A run like the others ends far below: so much falls after `share`.
    """
    target = share * max(curve.trained[-1] for curve in runs)
    return float(np.median([_at_tokens(curve, target)[0] for curve in runs]))


def final(runs: Sequence[Curve]) -> ndarray:
    """Return the mean over runs of the loss at their last evaluation point, [R + 1]."""
    return np.mean([curve.x[:, -1] for curve in runs], axis=0)


def _at_tokens(curve: Curve, tokens: float) -> ndarray:
    """Return the loss of a run after so many tokens, [R + 1], between evaluation points linear in their logarithm."""
    places = np.log(curve.trained)
    upper = int(np.clip(np.searchsorted(places, np.log(tokens)), 1, max(1, len(places) - 1)))
    if len(places) == 1:
        return curve.x[:, 0]
    share = np.clip((np.log(tokens) - places[upper - 1]) / (places[upper] - places[upper - 1]), 0, 1)
    return (1 - share) * curve.x[:, upper - 1] + share * curve.x[:, upper]


def points_within(curve: Curve, where: Range) -> int:
    """Return how many evaluation points of a run lie within reach of the range."""
    return int(np.sum(within_reach(curve, where)))


def within_reach(curve: Curve, where: Range) -> ndarray:
    """Return which evaluation points of a run lie within reach of the range, [K]."""
    low, high, width = where.low[0], where.high[0], where.width[0]
    return (curve.x[0] >= low - REACH * width) & (curve.x[0] <= high + REACH * width)


def level(curve: Curve, where: Range) -> ndarray:
    """Return mean and drift of a run's fitted curves over the range, [2, R + 1, D]; NaN in draws without a range."""
    width = where.width
    values = np.full((2, len(curve.x), len(curve.y)), np.nan)
    there = slice(None) if np.isfinite(width).all() else np.isfinite(width)  # a slice copies nothing
    within = (curve.x[there] - where.low[there, None]) / width[there, None]
    read = fitted(within, curve.y[:, there], PLACES, REACH)
    later, earlier = (half.mean(1) for half in np.split(read, 2, axis=1))  # from the lowest losses on
    values[:, there] = (later + earlier) / 2, later - earlier
    return values


def bias(curve: Curve, where: Range) -> ndarray:
    """Return how much half the bandwidth moves the mean over the range, [D]: about the error that the fit makes."""
    low, width = where.low[0], where.width[0]
    own = (smoother(curve.x[0], low + width * PLACES, share * width) for share in (REACH / 2, REACH))
    narrow, used = (curve.y[:, 0] @ weights.mean(0) for weights in own)
    return narrow - used


def read_off(curve: Curve, places: ndarray, bandwidth: float) -> ndarray:
    """Return a run's fitted curves at `places` [G] in each draw, [R + 1, G, D]."""
    return np.ascontiguousarray(fitted(curve.x, curve.y, places, bandwidth))


def scatter(curve: Curve, where: Range, places: ndarray) -> tuple[ndarray, float]:
    """Return the covariance [D, D] of `places @ curve` by the scatter of a run's points about the fit; its freedom.

    It holds for independent scatter, and says nothing of what another run would change: it serves where no variance of
    runs can be estimated.
    """
    low, width = where.low[0], where.width[0]
    x, y = curve.x[0], curve.y[:, 0].T
    near = within_reach(curve, where)
    own = smoother(x, x[near], REACH * width)
    residual = y[near] - own @ y
    freedom = max(1.0, near.sum() - np.trace(own[:, near]))
    weights = places @ smoother(x, low + width * PLACES, REACH * width)
    return residual.T @ residual / freedom * np.sum(weights**2), freedom


def more_tokens(runs: Sequence[Curve], loss: float) -> float | None:
    """Return how many more tokens runs would take until their mean loss, not below `loss` now, is `loss`.

    It is the median over runs of what each takes to fall as far as the mean has to; None where most never would.
    """
    fall = float(final(runs)[0]) - loss
    needed = [tokens_to_reach(curve.x[0, -1] - fall, curve.trained, curve.x[0]) for curve in runs]
    more = [np.inf if end is None else end - curve.trained[-1] for end, curve in zip(needed, runs, strict=True)]
    middle = float(np.median(more))
    return max(0.0, middle) if np.isfinite(middle) else None


def tokens_to_reach(loss: float, tokens: ndarray, losses: ndarray) -> float | None:
    """Extrapolate the tokens after which a run reaches `loss`, which is not above its last.

    From the last point on it falls as the line through the points of the second half of the tokens [K] does, at least
    three of them: the line itself may have been there already. The last three alone would say that nothing falls any
    more, as the learning rate has decayed there. None when it does not fall, or would take more than `LONGEST` times
    the tokens.

    Most losses fall ever more slowly, so it takes longer. Runs of quickstart's models with 16,000 to 1M tokens were
    compared with runs 2 to 128 times as long (86 pairs): to the final loss of those it took 0.8 to 7 times as many more
    tokens in eight pairs of ten, 2.5 times in the median; 0.8 to 3 times where they were twice as long. A line over the
    logarithm of tokens fits long runs, but was up to a million times too high for short ones, whose losses fall faster
    over the logarithm the longer they train.
    """
    if len(tokens) < 2:
        return None
    count = max(3, int(np.sum(2 * tokens >= tokens[-1])))
    fall, _ = np.polyfit(tokens[-count:] / tokens[-1], losses[-count:], 1)
    more = (loss - losses[-1]) / fall if fall < 0 else np.inf
    return float(tokens[-1] * (1 + more)) if more < LONGEST else None
