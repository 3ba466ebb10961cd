"""How far other runs and other documents would move a number: variances of runs, pooled over architectures.

A few runs of an architecture say little of its variance, those of all architectures together say more. The variance of
an architecture is taken to be drawn from a scaled inverse chi-squared distribution that all share (Smyth, SAGMB 3,
2004). Smyth reads its two parameters off hundreds of variances; a study has a dozen, so they stay uncertain here: what
the data leave open is drawn from, and intervals are quantiles of those draws.

One run of an architecture says nothing of its variance, and few runs of others say little of how widely variances
differ. With all that these leave open, intervals of rows of one run would rest on the widest distribution alone, the
more so the more rows a table has. Their variances are taken to differ as architectures' were measured to (`SPREAD`).

Every row contains the reference, which need not be as noisy as the others: in half of the draws its variance
is one of theirs, in the other half its own runs alone decide. In simulated studies that kept the coverage of nominal
95 % intervals above 94 % over rows and 91 % in the worst row, where the reference was three times as noisy as others
and the others differed by a factor of ten; either belief alone failed one of these or was much wider.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy import ndarray

#: Degrees of freedom that the shared distribution may have, from "architectures differ widely" to "they are alike".
SHARED_FREEDOMS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
#: The same of architectures with one run: 36 rows of three tables of limited-zoo have 4 or 5 most likely, 2 to 8 with
#: 96 % probability (results/intervals).
SPREAD = 4.0
#: Where its scale is looked for, in multiples of the mean variance.
SCALES = np.exp(np.linspace(-4, 4, 81))
#: Degrees of freedom of all runs together below which no variance is estimated.
FEWEST_FREEDOM = 2
#: Draws of errors behind an interval, and how many of them it should leave out: small levels take more draws.
DRAWS, LEFT_OUT = 40_000, 100
#: More draws than these would not fit into a few seconds.
MOST_DRAWS = 400_000
#: Their seed.
DRAW_SEED = 11
#: Eigenvalues of a covariance below this share of the largest are rounding errors.
NEGLIGIBLE = 1e-12
#: Splits of the reference's runs that are looked at, at most; their seed.
SPLITS, SPLIT_SEED = 2000, 12
#: With fewer runs of the reference two groups of them say nothing.
FEWEST_SPLIT = 4
#: Share of the splits outside the A-A range; looks at a study, which take smaller levels, do not widen it.
SPLIT_LEVEL = 0.05

Number = TypeVar("Number", float, ndarray)


@dataclass(frozen=True)
class Runs:
    """What the runs of one architecture say of their variance: the estimate, its freedom, how many runs there are."""

    variance: float
    freedom: int
    count: int

    @classmethod
    def of(cls, values: ndarray) -> "Runs":
        """Take one number per run, [n]."""
        count = len(values)
        return cls(variance=float(values.var(ddof=1)) if count > 1 else 0.0, freedom=count - 1, count=count)


@dataclass(frozen=True)
class Shared:
    """The distribution of variances over architectures: how likely each (freedom, scale) is, [F, S], and the scales."""

    likely: ndarray
    scales: ndarray

    @classmethod
    def fitted(cls, found: Sequence[Runs]) -> "Shared | None":
        """Fit the distribution; None where all runs together have fewer than two degrees of freedom."""
        repeated = [runs for runs in found if runs.freedom]
        own = np.array([runs.freedom for runs in repeated], dtype=float)
        if own.sum() < FEWEST_FREEDOM:
            return None
        observed = np.array([runs.variance for runs in repeated])
        middle = max(float(np.sum(observed * own) / own.sum()), np.finfo(float).tiny ** 0.5)
        scales = middle * SCALES
        ratios = np.maximum(observed, 1e-6 * middle) / scales[:, None]
        densities = [_log_density(ratios, own, free) - np.log(scales)[:, None] for free in SHARED_FREEDOMS]
        logs = np.sum(densities, axis=-1)
        likely = np.exp(logs - logs.max())
        return cls(likely=likely / likely.sum(), scales=scales)

    @property
    def freedom(self) -> float:
        """Degrees of freedom that the shared distribution is worth on the whole."""
        return float(1 / np.sum(self.likely.sum(1) / SHARED_FREEDOMS))

    @property
    def scale(self) -> float:
        """Its scale on the whole, a variance."""
        return float(np.exp(np.sum(self.likely * np.log(self.scales))))

    def moderate(self, variance: Number, freedom: int) -> Number:
        """Return the best estimate of a variance with `freedom` degrees of freedom of its own."""
        return (self.freedom * self.scale + variance * freedom) / (self.freedom + freedom)

    def draw(self, draws: int, generator: np.random.Generator) -> tuple[ndarray, ndarray]:
        """Draw freedoms and scales, [draws] each."""
        index = generator.choice(self.likely.size, size=draws, p=self.likely.ravel())
        return SHARED_FREEDOMS[index // len(self.scales)], self.scales[index % len(self.scales)]

    def draw_unknown(self, architectures: int, draws: int, generator: np.random.Generator) -> ndarray:
        """Draw variances of architectures with one run, [draws, architectures]."""
        known = self.likely[int(np.flatnonzero(SHARED_FREEDOMS == SPREAD)[0])]
        scale = generator.choice(self.scales, size=(draws, 1), p=known / known.sum())
        return SPREAD * scale / generator.chisquare(SPREAD, (draws, architectures))


def enough_draws(level: float) -> int:
    """Return how many draws of errors intervals at a level take, for their ends not to rest on a few of them."""
    return min(MOST_DRAWS, max(DRAWS, math.ceil(LEFT_OUT / level)))


def draw_variances(
    architectures: Sequence[Runs], reference: Runs, shared: Shared, draws: int, generator: np.random.Generator
) -> tuple[ndarray, ndarray]:
    """Draw the variance of a run of each architecture, [draws, A], and of the reference, [draws].

    Where the reference alone has several runs they alone say how it varies.
    """
    freedom, scale = shared.draw(draws, generator)

    def like_others(runs: Runs) -> ndarray:
        return (freedom * scale + runs.freedom * runs.variance) / generator.chisquare(freedom + runs.freedom)

    several = [place for place, runs in enumerate(architectures) if runs.freedom]
    theirs = like_others(reference) if reference.freedom and several else None
    if reference.freedom:
        alone = reference.freedom * reference.variance / generator.chisquare(reference.freedom, draws)
        theirs = alone if theirs is None else np.where(generator.random(draws) < 0.5, alone, theirs)
    variances = np.empty((draws, len(architectures)))
    for place in several:
        variances[:, place] = like_others(architectures[place])
    one = [place for place, runs in enumerate(architectures) if not runs.freedom]
    variances[:, one] = shared.draw_unknown(len(one), draws, generator)
    return variances, shared.draw_unknown(1, draws, generator)[:, 0] if theirs is None else theirs


def draw_students(rows: int, freedom: float, draws: int, generator: np.random.Generator) -> ndarray:
    """Draw from Student's t distribution of several rows, [draws, rows], that are uncorrelated and share a variance."""
    return np.sqrt(freedom / generator.chisquare(freedom, (draws, 1))) * generator.standard_normal((draws, rows))


def with_covariance(students: ndarray, covariance: ndarray) -> ndarray:
    """Return draws [draws, A] with this covariance [A, A] of their normal part."""
    values, vectors = np.linalg.eigh(covariance)
    values[values < NEGLIGIBLE * values.max()] = 0  # the root of a rounding error is no rounding error
    root = vectors * np.sqrt(values) @ vectors.T  # no sign of an eigenvector changes this root
    # In blocks, which are computed in this thread: a larger product would wait for threads of BLAS beside ours.
    blocks = students.reshape(-1, math.gcd(len(students), 100), len(root))
    return (blocks @ root).reshape(students.shape)


def _log_density(ratios: ndarray, own: ndarray, free: float) -> ndarray:
    """Return the log density of the F distribution with `own` and `free` degrees of freedom at `ratios`, [..., N].

    From its formula: scipy has it too, and takes as long to import as the rest of the package.
    """
    beta = [math.lgamma(half) + math.lgamma(free / 2) - math.lgamma(half + free / 2) for half in (own / 2).tolist()]
    scaled = own * ratios
    both = own * np.log(scaled) + free * math.log(free) - (own + free) * np.log(scaled + free)
    return both / 2 - np.log(ratios) - beta


@dataclass(frozen=True)
class HalfWidths:
    """Half-widths of intervals by row, [A]: for each row alone, and for all of them together."""

    single: ndarray
    joint: ndarray


def half_widths(errors: ndarray, level: float) -> HalfWidths:
    """Return how far errors [R, A] go with probability `1 - level`, in each row and in all rows at once.

    The joint half-widths leave out the same share of each row's errors. A draw is inside if its most extreme row is:
    rows are ranked, not measured, as their errors may be distributed differently (max-t intervals on ranks).
    """
    distances = np.abs(errors.T, order="C")
    count = len(errors)
    first = int((count - 1) * (1 - level))  # no rank below it counts
    largest = np.zeros(count)
    ordered = []
    for own in distances:
        index = np.argpartition(own, first)[first:]
        index = index[np.argsort(own[index])]
        largest[index] = np.maximum(largest[index], np.arange(first, count))
        ordered.append(own[index])
    single, joint = (
        np.array([own[min(count - 1, int(np.ceil(rank))) - first] for own in ordered])
        for rank in ((1 - level) * count, np.quantile(largest, 1 - level))
    )
    return HalfWidths(single=single, joint=joint)


def split_range(values: ndarray, level: float) -> float | None:
    """Return how far the means of two groups of runs of one architecture differ, in `1 - level` of the splits.

    Args:
        values: [n] one number per run.
        level: share of the splits that differ by more.

    Returns:
        None with fewer than four runs. With few splits, the largest difference.
    """
    count = len(values)
    if count < FEWEST_SPLIT:
        return None
    half = count // 2
    if count <= 14:
        groups = np.array(list(itertools.combinations(range(count), half)))
    else:
        generator = np.random.default_rng(SPLIT_SEED)
        groups = np.argsort(generator.random((SPLITS, count)), axis=1)[:, :half]
    first = values[groups].sum(1)
    difference = np.abs(first / half - (values.sum() - first) / (count - half))
    return float(np.quantile(difference, 1 - level, method="higher"))
