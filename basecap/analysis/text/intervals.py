"""Intervals of all differences to the reference in one table, from the levels of its runs in draws of documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy import ndarray

from basecap.analysis.text.noise import (
    DRAW_SEED,
    SPLIT_LEVEL,
    HalfWidths,
    Runs,
    Shared,
    draw_students,
    draw_variances,
    half_widths,
    split_range,
    with_covariance,
)

TINY = np.finfo(np.float64).tiny
Scatter = tuple[ndarray, float]


@dataclass(frozen=True, kw_only=True)
class Levels:
    """One row: levels over its trained range in R draws, row 0 the sample; and what the scatter of points says.

    Attributes:
        own: [n, R + 1, D] of the architecture's runs.
        reference: [m, R + 1, D] of the reference's runs over the same range.
        scatter: returns the covariance [D, D] of the mean level by the scatter of points, and its freedom, of both; it
            is called where no variance of runs can be estimated.
    """

    own: ndarray
    reference: ndarray
    scatter: Callable[[], tuple[Scatter, Scatter]]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What moves the differences to the reference: variances of means by row, [A], and of documents, [A, A]."""

    own: ndarray
    reference: ndarray
    documents: ndarray

    @property
    def variance(self) -> ndarray:
        """The variance of each difference, [A]."""
        return self.own + self.reference + np.diag(self.documents)


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Differences to the reference by row, [A]: values, errors, half-widths of intervals.

    `shared` is the distribution of the variances of runs, None where nothing could be said of them: errors then hold
    the documents and the scatter of points only. `split` is how far two groups of the reference's own runs differ.
    """

    value: ndarray
    errors: Errors
    half: HalfWidths
    shared: Shared | None
    split: float | None


class Table:
    """The rows of one table: all share the reference and the documents; the variance of runs is pooled over them."""

    def __init__(self, rows: Sequence[Levels], reference: ndarray, *, documents: int, level: float, draws: int):
        """Take the rows and the reference's own levels.

        Args:
            rows: of the architectures.
            reference: [m, R + 1, D] levels of the reference's runs over its own trained range.
            documents: degrees of freedom of what documents add.
            level: probability that the intervals together leave out something true.
            draws: of errors, behind each interval.
        """
        self.rows = rows
        self.level = level
        self.draws = draws
        self.documents = documents
        kept = ~np.any([np.isnan(row.own[0, :, 0]) | np.isnan(row.reference[0, :, 0]) for row in rows], axis=0)
        kept &= ~np.isnan(reference[0, :, 0])
        self.reference = reference[:, 0]
        self.levels = [(row.own[:, kept], row.reference[:, kept]) for row in rows]

    def estimate(self, weights: ndarray) -> Estimates:
        """Return what the table says of the mean over domains with `weights` [D]."""
        own, theirs = self._levels(weights)
        reference = self.reference @ weights
        shared = Shared.fitted([*map(_sample, own), Runs.of(reference)])
        errors = self._errors(weights, own, theirs, shared)
        drawn = with_covariance(self._drawn_once[0], errors.documents)
        drawn += self._scattered(errors) if shared is None else self._varied(own, Runs.of(reference), errors, shared)
        return Estimates(
            value=_differences(own, theirs),
            errors=errors,
            half=half_widths(drawn, self.level),
            shared=shared,
            split=split_range(reference, SPLIT_LEVEL),
        )

    def precisions(self, domains: int) -> ndarray:
        """Return weights of domains by precision, [D], the same in every row: the inverse of their mean variance."""
        variances = []
        for weights in np.eye(domains):
            own, theirs = self._levels(weights)
            shared = Shared.fitted([*map(_sample, own), Runs.of(self.reference @ weights)])
            variances.append(self._errors(weights, own, theirs, shared).variance.mean())
        precision = 1 / np.maximum(variances, TINY)
        return precision / precision.sum()

    @cached_property
    def _drawn_once(self) -> tuple[ndarray, ndarray, ndarray]:
        """Draws of documents [draws, A] and of runs, [draws, A] and [draws]: the same for every mean over domains."""
        generator = np.random.default_rng(DRAW_SEED + 1)
        students = draw_students(len(self.rows), self.documents, self.draws, generator)
        return students, generator.standard_normal((self.draws, len(self.rows))), generator.standard_normal(self.draws)

    @cached_property
    def _scatter(self) -> list[tuple[Scatter, Scatter]]:
        return [row.scatter() for row in self.rows]

    def _levels(self, weights: ndarray) -> tuple[list[ndarray], list[ndarray]]:
        return [own @ weights for own, _ in self.levels], [theirs @ weights for _, theirs in self.levels]

    def _errors(
        self, weights: ndarray, own: Sequence[ndarray], theirs: Sequence[ndarray], shared: Shared | None
    ) -> Errors:
        if shared is None:
            return Errors(
                own=np.array([weights @ own[0] @ weights for own, _ in self._scatter]),
                reference=np.array([weights @ other[0] @ weights for _, other in self._scatter]),
                documents=_documents(own, theirs, within=False),
            )
        ours, others = (
            [shared.moderate(runs.variance, runs.freedom) / runs.count for runs in map(_sample, group)]
            for group in (own, theirs)
        )
        return Errors(own=np.array(ours), reference=np.array(others), documents=_documents(own, theirs, within=True))

    def _varied(self, own: Sequence[ndarray], reference: Runs, errors: Errors, shared: Shared) -> ndarray:
        """Draw the errors that runs make, [draws, A], from what they say of their variance."""
        ours = [_sample(part) for part in own]
        generator = np.random.default_rng(DRAW_SEED)
        variances, theirs = draw_variances(ours, reference, shared, self.draws, generator)
        # The range of a row may be shorter than the reference's own, and its variance there another.
        factor = errors.reference / max(shared.moderate(reference.variance, reference.freedom), TINY)
        return self._drawn(variances / [runs.count for runs in ours], theirs, factor)

    def _scattered(self, errors: Errors) -> ndarray:
        """Draw the errors that runs make, [draws, A], from the scatter of points alone."""
        generator = np.random.default_rng(DRAW_SEED)
        ours, others = (np.array([found[side][1] for found in self._scatter]) for side in (0, 1))
        variances = errors.own * ours / generator.chisquare(ours, (self.draws, len(self.rows)))
        return self._drawn(variances, others.min() / generator.chisquare(others.min(), self.draws), errors.reference)

    def _drawn(self, own: ndarray, reference: ndarray, factor: ndarray) -> ndarray:
        """Draw errors of these variances: `own` [draws, A], overwritten, and `reference` [draws] times `factor` [A]."""
        _, ours, theirs = self._drawn_once
        errors = np.sqrt(own, out=own)
        errors *= ours
        errors += np.outer(np.sqrt(reference) * theirs, np.sqrt(factor))
        return errors


def _differences(own: Sequence[ndarray], theirs: Sequence[ndarray]) -> ndarray:
    return np.array([part[:, 0].mean() - other[:, 0].mean() for part, other in zip(own, theirs, strict=True)])


def _sample(levels: ndarray) -> Runs:
    return Runs.of(levels[:, 0])


def _documents(own: Sequence[ndarray], theirs: Sequence[ndarray], *, within: bool) -> ndarray:
    """Return the covariance [A, A] of the differences over draws of documents.

    The variance of runs holds what documents do to single runs already; with `within` only the rest is returned.

    Args:
        own, theirs: [n, R + 1] levels by row.
        within: whether the variance of runs is counted beside it.
    """
    differences = np.stack([part.mean(0) - other.mean(0) for part, other in zip(own, theirs, strict=True)])
    deviations = differences[:, 1:] - differences[:, 1:].mean(1, keepdims=True)
    # In this thread, as a product of BLAS would wait for its other threads: 65 ms where other programs use the cores.
    covariance = np.einsum("ar,br->ab", deviations, deviations) / (deviations.shape[1] - 1)
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
