"""What a gap is worth, the share of its tokens after which the reference itself would be that good; the verdict.

Over the last part of its training the reference's loss on unseen domains falls by some nats per factor of e in tokens,
`Fall.slope`, so a gap of g nats is worth the share exp(g / slope). The slope is measured on the same few runs as the
gap, and their errors are related: a run that ends low may have fallen fast. Which r = log(share) the data allow follows
from the error of g - r * slope (Fieller, JRSS B 16, 1954). An error of the slope that would happen to cancel that of
the gap never makes an interval shorter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.rows import Interval, Verdict
from basecap.analysis.text.draws import Curve
from basecap.analysis.text.intervals import TINY

#: No run will see e^40 tokens (2e17).
LARGEST_EXPONENT = 40.0


@dataclass(frozen=True)
class Lines:
    """Least-squares lines of the reference's losses over the logarithm of its tokens, from a share of them on.

    Attributes:
        slopes: [n, D] of its runs; NaN for a run with fewer than two evaluation points there.
        scatter: [D, D] covariance that the scatter of points about the lines gives the mean slope. It says nothing of
            what another run would change: it serves where there is a single run.
    """

    slopes: ndarray
    scatter: ndarray

    @classmethod
    def of(cls, runs: Sequence[Curve], share: float) -> "Lines":
        """Fit the lines of all runs."""
        begin = share * max(curve.trained[-1] for curve in runs)
        found = [_line(curve, begin) for curve in runs]
        slopes = np.array([slope for slope, _ in found])
        count = max(1, int(np.isfinite(slopes[:, 0]).sum()))
        return cls(slopes=slopes, scatter=np.nansum([error for _, error in found], axis=0) / count**2)

    def fall(self, weights: ndarray, levels: ndarray) -> "Fall":
        """Return how fast the mean loss over domains falls; `levels` [n] are those of the same runs."""
        slopes = self.slopes @ weights
        kept = np.isfinite(slopes)
        count = int(kept.sum())
        if count < 2:
            slope = float(slopes[kept][0]) if count else math.nan
            return Fall(slope=slope, variance=float(weights @ self.scatter @ weights), shared=0.0)
        covariance = np.cov(slopes[kept], levels[kept]) / count
        return Fall(slope=float(slopes[kept].mean()), variance=float(covariance[0, 0]), shared=float(covariance[0, 1]))


def _line(curve: Curve, begin: float) -> tuple[ndarray, ndarray]:
    """Return the slopes [D] of a run's losses over the logarithm of its tokens, and their covariance [D, D]."""
    kept = curve.trained >= begin
    count, domains = int(kept.sum()), len(curve.y)
    if count < 2:
        return np.full(domains, np.nan), np.full((domains, domains), np.nan)
    places = np.log(curve.trained[kept])
    places = places - places.mean()
    losses = curve.y[:, 0, kept]
    slopes = losses @ places / (places @ places)
    left = losses - losses.mean(1, keepdims=True) - np.outer(slopes, places)
    return slopes, left @ left.T / max(1, count - 2) / (places @ places)


@dataclass(frozen=True)
class Fall:
    """How fast the reference's loss falls, in nats per factor of e in its tokens.

    Attributes:
        slope: mean over its runs, negative where the loss falls; NaN where that was not measured.
        variance: of that mean.
        shared: its covariance with the mean level of the reference's runs, which every gap contains.
    """

    slope: float
    variance: float
    shared: float

    @property
    def measured(self) -> bool:
        """Whether the loss falls: else no gap is worth any number of tokens."""
        return self.slope < 0  # not where it is NaN

    def tolerance(self, cost: float) -> float:
        """Return the gap that is worth this share of the tokens, in nats."""
        return float(self.slope * math.log1p(-cost))

    def tolerance_error(self, cost: float) -> float:
        """Return the standard error of `tolerance`."""
        return float(-math.log1p(-cost) * math.sqrt(self.variance))

    def margin(self, cost: float, half: float, variance: float) -> float:
        """Return how far below `tolerance` an interval of so much `variance` must end to count as kept, in nats."""
        exponent = math.log1p(-cost)
        added = max(0.0, exponent**2 * self.variance + 2 * exponent * self.shared)
        return half * (math.sqrt(1 + added / max(variance, TINY)) - 1)

    def worth(self, gap: Interval, variance: float) -> Interval:
        """Return after which share of its tokens the reference is as good as an architecture, for a gap of `variance`.

        Both ends have the error of the slope in them, in as many standard errors as the gap's interval reaches.
        """
        half = gap.high - gap.value
        reach = half**2 / max(variance, TINY)
        shared = float(np.clip(self.shared, -math.sqrt(variance * self.variance), math.sqrt(variance * self.variance)))
        # The ends are where (gap - r * slope)**2 is reach * (variance + 2 * r * shared + r**2 * self.variance).
        square = self.slope**2 - reach * self.variance
        linear = gap.value * self.slope + reach * shared
        root = linear**2 - square * (gap.value**2 - half**2)
        low, high = gap.high / self.slope, gap.low / self.slope
        found = [-math.inf, math.inf]
        if square > 0:
            found = [(linear - math.sqrt(max(root, 0.0))) / square, (linear + math.sqrt(max(root, 0.0))) / square]
        elif square < 0 < root:  # what lies between the two is excluded, and the slope may be zero
            pair = sorted([(linear - math.sqrt(root)) / square, (linear + math.sqrt(root)) / square])
            found = [pair[1], math.inf] if pair[1] <= gap.value / self.slope else [-math.inf, pair[0]]
        return Interval(
            value=_share(gap.value / self.slope), low=_share(min(low, found[0])), high=_share(max(high, found[1]))
        )


def _share(exponent: float) -> float:
    return math.exp(min(max(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT))


def judge(
    interval: Interval, tokens: Interval | None, tolerance: float | None, cost: float, split: float | None
) -> Verdict:
    """Return what the interval of a gap, and that of what it is worth, say.

    *Keeps*: the reference is as good only after more than all but `cost` of its tokens, so that the interval ends below
    the tolerance, also when the tolerance's error is counted. *Degrades*: the interval begins above zero, and the
    estimate exceeds the tolerance and, where that is known, the difference between two groups of the reference's own
    runs. *Undecided* otherwise, and without a tolerance: the reference's loss on unseen domains does not fall.
    """
    if tokens is None or tolerance is None:
        return "undecided"
    if tokens.low > 1 - cost:
        return "keeps"
    worse = interval.low > 0 and interval.value > tolerance
    return "degrades" if worse and (split is None or interval.value > split) else "undecided"
