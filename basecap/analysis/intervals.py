"""Intervals of all differences to the reference in one table, from the levels of its runs in draws of documents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.noise import Errors, Prior, half_width, pooled, simultaneous_level, split_range


@dataclass(frozen=True, kw_only=True)
class Levels:
    """One row: levels over its trained range in R draws, row 0 the sample; and what the scatter of points says.

    Attributes:
        own: [n, R + 1, D] of the architecture's runs.
        reference: [m, R + 1, D] of the reference's runs over the same range.
        own_scatter, reference_scatter: covariance [D, D] of the mean level by the scatter of points, and its freedom.
    """

    own: ndarray
    reference: ndarray
    own_scatter: tuple[ndarray, float]
    reference_scatter: tuple[ndarray, float]


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Differences to the reference by row, [A] each: value, standard error, half-widths alone and for all together.

    `prior` is the pooled variance of runs, None where none could be estimated: the errors then hold the documents and
    the scatter of points only. `split` is the range of differences between two groups of the reference's own runs.
    """

    value: ndarray
    errors: Errors
    single: ndarray
    joint: ndarray
    level: float
    prior: Prior | None
    split: float | None


class Table:
    """The rows of one table: all share the reference and the documents; the variance of runs is pooled over them."""

    def __init__(self, rows: Sequence[Levels], reference: ndarray, *, documents: int, level: float):
        """Take the rows and the reference's own levels.

        Args:
            rows: of the architectures.
            reference: [m, R + 1, D] levels of the reference's runs over its own trained range.
            documents: degrees of freedom of what documents add.
            level: probability that the intervals together leave out something true.
        """
        self.rows = rows
        self.reference = reference
        self.documents = documents
        self.level = level
        kept = ~np.any([np.isnan(row.own[0, :, 0]) | np.isnan(row.reference[0, :, 0]) for row in rows], axis=0)
        self.kept = kept & ~np.isnan(reference[0, :, 0])

    def estimate(self, weights: ndarray) -> Estimates:
        """Return what the table says of the mean over domains with `weights` [D]."""
        own = [row.own[:, self.kept] @ weights for row in self.rows]
        theirs = [row.reference[:, self.kept] @ weights for row in self.rows]
        samples = [part[:, 0] for part in own]
        reference = self.reference[:, 0] @ weights
        repeated = [part for part in (*samples, reference) if len(part) > 1]
        prior = pooled([part.var(ddof=1) for part in repeated], [len(part) - 1 for part in repeated])
        if prior is None:
            errors = self._of_scatter(own, theirs, weights)
        else:
            errors = self._of_runs(own, theirs, prior)
        joint = simultaneous_level(errors, self.level)
        return Estimates(
            value=np.array([part[:, 0].mean() - other[:, 0].mean() for part, other in zip(own, theirs, strict=True)]),
            errors=errors,
            single=half_width(errors.variance, errors.freedom, self.level),
            joint=half_width(errors.variance, errors.freedom, joint),
            level=joint,
            prior=prior,
            split=split_range(reference, self.level),
        )

    def _of_runs(self, own: Sequence[ndarray], theirs: Sequence[ndarray], prior: Prior) -> Errors:
        moderated = [prior.moderate(*_variance(part[:, 0])) for part in own]
        reference = [prior.moderate(*_variance(part[:, 0])) for part in theirs]
        return Errors(
            own=np.array([variance / len(part) for (variance, _), part in zip(moderated, own, strict=True)]),
            own_freedom=np.array([freedom for _, freedom in moderated]),
            reference=np.array([variance / len(part) for (variance, _), part in zip(reference, theirs, strict=True)]),
            reference_freedom=reference[0][1],
            documents=_documents(own, theirs, within=True),
            documents_freedom=self.documents,
        )

    def _of_scatter(self, own: Sequence[ndarray], theirs: Sequence[ndarray], weights: ndarray) -> Errors:
        """Return errors that say nothing of what another run would change."""
        ours, others = ([getattr(row, name) for row in self.rows] for name in ("own_scatter", "reference_scatter"))
        return Errors(
            own=np.array([weights @ covariance @ weights for covariance, _ in ours]),
            own_freedom=np.array([freedom for _, freedom in ours]),
            reference=np.array([weights @ covariance @ weights for covariance, _ in others]),
            reference_freedom=min(freedom for _, freedom in others),
            documents=_documents(own, theirs, within=False),
            documents_freedom=self.documents,
        )


def _variance(values: ndarray) -> tuple[float, int]:
    return (float(values.var(ddof=1)), len(values) - 1) if len(values) > 1 else (0.0, 0)


def _documents(own: Sequence[ndarray], theirs: Sequence[ndarray], *, within: bool) -> ndarray:
    """Return the covariance [A, A] of the differences over draws of documents.

    The variance of runs holds what documents do to single runs already; with `within` only the rest is returned.

    Args:
        own, theirs: [n, R + 1] levels by row.
        within: whether the variance of runs is counted beside it.
    """
    differences = np.stack([part.mean(0) - other.mean(0) for part, other in zip(own, theirs, strict=True)])
    covariance = np.atleast_2d(np.cov(differences[:, 1:]))
    if within:
        held = np.array([_within(part) + _within(other) for part, other in zip(own, theirs, strict=True)])
        whole = np.diag(covariance)
        factor = np.sqrt(np.clip(1 - held / np.where(whole > 0, whole, 1.0), 0, 1))
        covariance = covariance * factor[:, None] * factor
    return covariance


def _within(levels: ndarray) -> float:
    """Return the variance that draws of documents give the mean of runs by what they do to single runs."""
    count = len(levels)
    if count < 2:
        return 0.0
    deviations = levels[:, 1:] - levels[:, :1]
    return float((deviations - deviations.mean(0)).var(axis=1).mean() / (count - 1))


def domain_weights(table: Table, domains: int) -> ndarray:
    """Return weights of domains by precision, [D], the same in every row: the inverse of their mean variance."""
    variances = np.array([table.estimate(row).errors.variance.mean() for row in np.eye(domains)])
    precision = 1 / np.maximum(variances, np.finfo(float).tiny)
    return precision / precision.sum()
