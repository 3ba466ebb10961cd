"""The gap: how much worse out of domain than the reference, at equal pre-training loss.

Every evaluated checkpoint is a point: x its loss on held-out text of the training domains, y its loss on a domain it
never saw. The gap of an architecture is the mean over the range of x that all its runs and the reference's have seen of
y - y_reference, both read off interpolated curves. Documents are drawn with replacement, the same draw for every
checkpoint of every model and for x and y alike, and the whole estimate is computed again for each draw: so both curves
carry their error, and the difficulty of single documents, far larger than any gap, cancels.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy import ndarray
from scipy.special import stdtr, stdtrit

from basecap.analysis.curve import interpolate

Verdict = Literal["keeps", "degrades", "undecided"]

#: Places over the shared range at which two curves are compared: the midpoints of as many cells.
PLACES = 64
#: Share of the interval's probability.
CONFIDENCE = 0.95
#: Largest share of draws that may lose the shared range before the interval would mislead.
LOST_DRAWS = 0.05
#: Steps of a bisection, after which a distribution is as good as linear: they leave 1/256 of the deviations' range.
HALVINGS = 8
#: No run will see e^40 tokens (2e17).
LARGEST_EXPONENT = 40.0
#: Below this share of their variance left in the residuals, checkpoints say nothing of their scatter.
SMALLEST_SHARE = 0.01


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval; NaN where there is no interval. Numbers, or arrays of one shape."""

    value: ndarray
    low: ndarray
    high: ndarray


def resample(nats: ndarray, tokens: ndarray, resamples: int, generator: np.random.Generator) -> tuple[ndarray, ndarray]:
    """Sum losses over documents and over draws of documents with replacement.

    Args:
        nats: [N, P] float64, the summed loss of each of N documents in each of P checkpoints.
        tokens: [N] predicted tokens of each document.
        resamples: number of draws R.
        generator: source of the draws.

    Returns:
        Summed nats [R + 1, P] and tokens [R + 1]; row 0 is the sample itself.
    """
    count = len(tokens)
    columns = np.concatenate([nats, tokens[:, None]], axis=1)
    sums = [columns.sum(0, keepdims=True)]
    rows = max(1, 4_000_000 // count)
    for first in range(0, resamples, rows):
        some = min(rows, resamples - first)
        drawn = generator.integers(count, size=(some, count)) + np.arange(some)[:, None] * count
        weights = np.bincount(drawn.ravel(), minlength=some * count).reshape(some, count)
        sums.append(weights.astype(np.float64) @ columns)
    total = np.concatenate(sums)
    return total[:, :-1], total[:, -1]


def shared_places(*curves: ndarray) -> ndarray:
    """Return the places at which curves are compared: the midpoints of equal cells of the range that all have seen.

    Args:
        curves: [R, K] pre-training losses of K checkpoints, any number of them for each curve, in each of R draws.

    Returns:
        [R, PLACES], from the lowest shared loss to the highest; NaN in draws without a shared range.
    """
    low = np.max([x.min(1) for x in curves], axis=0)
    high = np.min([x.max(1) for x in curves], axis=0)
    width = np.where(low < high, high - low, np.nan)
    return low[:, None] + width[:, None] * ((np.arange(PLACES) + 0.5) / PLACES)


def compare(places: ndarray, x: ndarray, y: ndarray, x_reference: ndarray, y_reference: ndarray) -> ndarray:
    """Compare two curves at places that both have seen, many draws at once.

    Args:
        places: [R, PLACES] of R draws, within the range of both curves, or NaN.
        x, y: [R, K] losses of an architecture's K checkpoints in any order.
        x_reference, y_reference: [R, K'] of the reference.

    Returns:
        y - y_reference at the places [R, PLACES]; NaN where they are.
    """
    there = ~np.isnan(places).any(1)
    difference = np.full_like(places, np.nan)
    if there.any():
        ours, theirs = (
            interpolate(*_sorted(abscissa[there], ordinate[there]), places[there])
            for abscissa, ordinate in ((x, y), (x_reference, y_reference))
        )
        difference[there] = ours - theirs
    return difference


@dataclass(frozen=True)
class Scatter:
    """The error of a gap that the scatter of checkpoints causes: standard error, a number or [...]; its freedom."""

    error: ndarray
    freedom: float


def scatter(places: ndarray, difference: ndarray, x: ndarray, x_reference: ndarray) -> tuple[Scatter, Scatter]:
    """Estimate from a single pair of runs how far the scatter of their checkpoints moves the gap.

    The loss out of domain jumps from checkpoint to checkpoint, most where the learning rate is high, and no document
    is to blame. Seen as independent noise of one variance on every checkpoint, carried to the places by linear
    interpolation, it leaves a known share of that variance in the residuals of the difference about its linear trend,
    with the degrees of freedom of Satterthwaite (Biometrics Bulletin 2, 1946). The mean over all places averages over
    many checkpoints; a place near the end of the range carries all the noise of one or two of them.

    The curves are cubics: between distant checkpoints they move further than lines, and leave as much more in the
    residuals; at both ends they move like lines. Intervals of 95 % thereby hold the truth in 93 to 99 % of simulated
    studies, on the mean and at the places. Noise that falls with the learning rate makes those at the lowest loss wider
    still, and at the highest a little too narrow; were it to grow in the course of training, it would be the reverse.

    Args:
        places, difference: [PLACES] what `compare` returns for the sample itself.
        x, x_reference: [K], [K'] pre-training losses of the checkpoints.

    Returns:
        The error of the mean difference, and that of the difference at each place [PLACES]; NaN when there are too few
        checkpoints to tell.
    """
    carried = np.concatenate([_weights(x, places), _weights(x_reference, places)], axis=1)
    trend, _ = np.linalg.qr(np.stack([np.ones_like(places), places], axis=1))
    left = carried - trend @ (trend.T @ carried)
    covariance = left.T @ left
    share = np.trace(covariance) / len(places)
    variance, freedom = np.nan, 1.0
    if share >= SMALLEST_SHARE:
        residual = difference - trend @ (trend.T @ difference)
        variance = np.mean(residual**2) / share
        freedom = float(np.trace(covariance) ** 2 / np.sum(covariance**2))
    errors = (np.sqrt(variance * np.sum(weights**2, axis=-1)) for weights in (carried.mean(0), carried))
    mean, along = (Scatter(error=error, freedom=freedom) for error in errors)
    return mean, along


def interval(values: ndarray, single: Scatter | None = None) -> Interval:
    """Return the mean over seeds and its interval.

    Draws of documents give the spread for these trained models. With several seeds, a pair of models per seed, the
    spread between the pairs is added as Student's t with one degree of freedom less than there are pairs: drawing two
    to five seeds with replacement would give intervals far too narrow. The spread between pairs already holds the
    part of the documents' spread that differs from pair to pair, so only the rest of that is kept beside it.

    Args:
        values: [S, R + 1, ...] an estimate per seed and draw, row 0 from the sample itself, which must not be NaN.
        single: with one seed, what to add for the scatter of its checkpoints; its error has the shape [...].
    """
    value = values[:, 0].mean(0)
    kept = ~np.isnan(values).any(axis=(0, *range(2, values.ndim)))
    if 1 - kept.mean() > LOST_DRAWS:
        missing = np.full_like(value, np.nan)
        return Interval(value=value, low=missing, high=missing)
    seeds, sample, draws = len(values), values[:, 0], values[:, kept][:, 1:]
    deviations = draws.mean(0) - value
    tails = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    if seeds > 1:
        own = (draws - sample[:, None]).var(axis=0, ddof=1).mean(0) / seeds
        whole = deviations.var(axis=0)
        common = np.sqrt(np.clip(1 - own / np.where(whole > 0, whole, 1.0), 0, 1))
        error = sample.std(axis=0, ddof=1) / np.sqrt(seeds)
        low, high = (_quantile(common * deviations, error, seeds - 1, tail) for tail in tails)
    elif single is not None:
        low, high = (_quantile(deviations, single.error, single.freedom, tail) for tail in tails)
    else:
        low, high = np.quantile(deviations, tails, axis=0, method="weibull")
    return Interval(value=value, low=value + low, high=value + high)


def _quantile(deviations: ndarray, error: ndarray, freedom: float, share: float) -> ndarray:
    """Return the quantile of one of the deviations [R, ...], all alike likely, plus `error` [...] times Student's t.

    By bisection on the distribution itself: where t is drawn, with few degrees of freedom, a few extreme draws decide.
    """
    error = np.maximum(error, np.finfo(np.float64).tiny ** 0.5)  # none leaves the deviations alone
    farthest = error * stdtrit(freedom, share)
    low, high = deviations.min(0) + farthest, deviations.max(0) + farthest
    below, above = np.zeros_like(low), np.ones_like(high)  # the shares there
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = stdtr(freedom, (middle - deviations) / error).mean(0)
        left = found < share
        low, below = np.where(left, middle, low), np.where(left, found, below)
        high, above = np.where(left, high, middle), np.where(left, above, found)
    return low + (high - low) * (share - below) / (above - below)


def verdict(low: float, high: float, end: float, tolerance: float) -> Verdict:
    """Return what the interval of a gap says, and the upper end `end` of that at the lowest shared loss.

    Keeps below `tolerance`, there too; else degrades above zero; else undecided.
    """
    if high < tolerance and end < tolerance:
        return "keeps"
    return "degrades" if low > 0 else "undecided"


def tokens_to_reach(loss: float, tokens: ndarray, losses: ndarray) -> float | None:
    """Extrapolate the tokens after which a run reaches `loss`, which is not above its last.

    From the last checkpoint on it falls as the line through the last three does, loss over the logarithm of tokens [K]:
    the line itself may have been there already. None when it does not fall or would take for ever.
    """
    if len(tokens) < 2:
        return None
    slope, _ = np.polyfit(np.log(tokens[-3:]), losses[-3:], 1)
    exponent = np.log(tokens[-1]) + (loss - losses[-1]) / slope if slope < 0 else np.inf
    return float(np.exp(exponent)) if exponent < LARGEST_EXPONENT else None


def _weights(x: ndarray, places: ndarray) -> ndarray:
    """Return the weight of each checkpoint in the line through all of them at each place, [PLACES, K]."""
    order = np.sort(x)
    return np.stack([np.interp(places, order, unit) for unit in np.eye(len(order))], axis=1)


def _sorted(x: ndarray, y: ndarray) -> tuple[ndarray, ndarray]:
    order = np.argsort(x, axis=1, kind="stable")
    return np.take_along_axis(x, order, axis=1), np.take_along_axis(y, order, axis=1)
