"""How far another run would move a number: variances of runs, pooled over architectures, and intervals from them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy import ndarray
from scipy.special import stdtr, stdtrit
from scipy.stats import f as f_distribution

#: Degrees of freedom that the pooled variance may be worth, from "says little" to "architectures are alike".
PRIOR_FREEDOMS = (2.0, 4.0, 8.0, 16.0, 32.0)
#: Places per factor of e at which the pooled variance is looked for, and how far around the middle of the variances.
VARIANCE_GRID = np.exp(np.linspace(-4, 4, 81))
#: Own degrees of freedom below which nothing can be said of runs.
FEWEST_FREEDOM = 2
#: Simulated tables behind simultaneous intervals; their seed.
SIMULATED, SIMULATION_SEED = 20_000, 11
#: Splits of the reference's runs that are looked at, at most; their seed.
SPLITS, SPLIT_SEED = 2000, 12
#: With fewer runs of the reference two groups of them say nothing.
FEWEST_SPLIT = 4

Number = TypeVar("Number", float, ndarray)


@dataclass(frozen=True)
class Prior:
    """What the variances of all architectures say of one: a variance worth so many degrees of freedom."""

    variance: float
    freedom: float

    def moderate(self, variance: Number, freedom: int) -> tuple[Number, float]:
        """Return the variance of an architecture with `freedom` of its own, moderated, and its degrees of freedom."""
        total = self.freedom + freedom
        return (self.freedom * self.variance + variance * freedom) / total, total


def pooled(variances: Sequence[float], freedoms: Sequence[int]) -> Prior | None:
    """Estimate how variances of runs are distributed over architectures (Smyth, SAGMB 3, 2004, section 6).

    The variance of each architecture is taken to be drawn from a scaled inverse chi-squared distribution, so that the
    observed ones over the scale follow F(own, prior) distributions. Smyth's moments need hundreds of variances; here
    there are few, so the likelihood is averaged over `PRIOR_FREEDOMS`, each as likely as the others beforehand, and
    over a grid of scales. Freedoms are averaged as 1 / freedom, which leans towards wider intervals.

    Args:
        variances: of each architecture with at least two runs, positive or zero.
        freedoms: its number of runs less one.

    Returns:
        None when the degrees of freedom together are fewer than two.
    """
    observed, own = np.asarray(variances, dtype=float), np.asarray(freedoms, dtype=float)
    if own.sum() < FEWEST_FREEDOM:
        return None
    middle = np.sum(observed * own) / own.sum()
    if middle <= 0:
        return Prior(variance=0.0, freedom=own.sum())
    scales = middle * VARIANCE_GRID
    ratios = np.maximum(observed, 1e-6 * middle) / scales[:, None]
    densities = [f_distribution.logpdf(ratios, own, prior) - np.log(scales)[:, None] for prior in PRIOR_FREEDOMS]
    logs = np.sum(densities, axis=-1)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    freedom = 1 / np.sum(weights.sum(1) / np.array(PRIOR_FREEDOMS))
    return Prior(variance=float(np.exp(np.sum(weights * np.log(scales)))), freedom=float(freedom))


@dataclass(frozen=True)
class Errors:
    """The error of differences to a reference, by row: variance parts [A] of the mean and their degrees of freedom.

    Attributes:
        own, own_freedom: of each architecture's runs.
        reference, reference_freedom: of the reference's runs, over the range of the row.
        documents: [A, A] covariance of what the documents add, on which all rows draw.
        documents_freedom: of that.
    """

    own: ndarray
    own_freedom: ndarray
    reference: ndarray
    reference_freedom: float
    documents: ndarray
    documents_freedom: float

    @property
    def variance(self) -> ndarray:
        """The variance of each difference, [A]."""
        return self.own + self.reference + np.diag(self.documents)

    @property
    def freedom(self) -> ndarray:
        """Degrees of freedom of each variance, [A] (Satterthwaite, Biometrics Bulletin 2, 1946)."""
        parts = (
            self.own**2 / self.own_freedom
            + self.reference**2 / self.reference_freedom
            + np.diag(self.documents) ** 2 / self.documents_freedom
        )
        tiny = np.finfo(float).tiny
        return np.clip(self.variance**2 / np.maximum(parts, tiny), 1.0, 1e6)


def simultaneous_level(errors: Errors, level: float) -> float:
    """Return the two-sided level of each single interval at which all of them together hold with `1 - level`.

    All rows share the error of the reference and of the documents. Tables without any difference are simulated with
    these errors, each with variances estimated anew; what counts in one is its smallest p value (as with Dunnett's or
    max-t intervals, for rows of unequal degrees of freedom).
    """
    generator = np.random.default_rng(SIMULATION_SEED)
    rows = len(errors.own)
    if rows == 0:
        return level

    def chi(freedom: ndarray | float, shape: tuple[int, ...]) -> ndarray:
        return generator.chisquare(freedom, shape) / freedom

    shared = generator.standard_normal((SIMULATED, 1))
    values, vectors = np.linalg.eigh(errors.documents)
    root = vectors * np.sqrt(np.clip(values, 0, None))
    difference = (
        np.sqrt(errors.own) * generator.standard_normal((SIMULATED, rows))
        + np.sqrt(errors.reference) * shared
        + generator.standard_normal((SIMULATED, rows)) @ root.T
    )
    variance = (
        errors.own * chi(errors.own_freedom, (SIMULATED, rows))
        + errors.reference * chi(errors.reference_freedom, (SIMULATED, 1))
        + np.diag(errors.documents) * chi(errors.documents_freedom, (SIMULATED, 1))
    )
    t = np.abs(difference) / np.sqrt(np.maximum(variance, np.finfo(float).tiny))
    smallest = (2 * stdtr(errors.freedom, -t)).min(axis=1)
    return float(min(level, np.quantile(smallest, level)))


def half_width(variance: ndarray | float, freedom: ndarray | float, level: float) -> ndarray:
    """Return Student's quantile at `level`, two-sided, times the error."""
    return -stdtrit(freedom, level / 2) * np.sqrt(variance)


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
