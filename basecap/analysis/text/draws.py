"""Draws of held-out documents: one draw for every evaluation point of every run, for x and y alike.

Documents differ far more from each other than architectures do. As all curves are computed again in each draw, from
the same documents, the difficulty of single documents cancels in every difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.text.losses import RunLosses

#: With fewer independent documents (or clusters of them) an interval from drawing them is too narrow.
FEWEST_DOCUMENTS = 30
#: The same for one training domain among others. A domain of one document would not vary at all: where it held half
#: of the tokens, nominal 95 % intervals were true in 45 % of simulated studies.
FEWEST_OF_A_DOMAIN = 10

#: Units that are drawn at a time: larger arrays do not fit into a processor's cache, and new memory takes longer.
BLOCK = 50_000

#: The losses of every run that has some, by architecture and seed.
Runs = dict[tuple[str, int], RunLosses]


@dataclass(frozen=True)
class Curve:
    """One run in R draws of documents, row 0 the sample itself: x [R + 1, K], y [D, R + 1, K], tokens trained [K]."""

    x: ndarray
    y: ndarray
    trained: ndarray

    def of(self, draws: slice) -> "Curve":
        """Return this run in the given draws only."""
        return Curve(x=self.x[draws], y=self.y[:, draws], trained=self.trained)


@dataclass(frozen=True)
class Draws:
    """R draws of the units of a domain (documents or clusters) with replacement, the same for all runs.

    Attributes:
        unit: [documents] the unit of each document.
        weights: [R, units] how often each is drawn.
        size: [R + 1] tokens in each draw, first those of the sample itself.
    """

    unit: ndarray
    weights: ndarray
    size: ndarray

    @classmethod
    def of(cls, unit: ndarray, tokens: ndarray, draws: int, generator: np.random.Generator) -> "Draws":
        """Draw units of documents that have so many tokens each, [documents]."""
        count = int(unit.max()) + 1
        weights = np.empty((draws, count))
        rows = max(1, BLOCK // count)
        for first in range(0, draws, rows):
            part = weights[first : first + rows]
            drawn = generator.integers(count, size=part.shape)
            drawn += np.arange(len(part))[:, None] * count
            part[:] = np.bincount(drawn.ravel(), minlength=part.size).reshape(part.shape)
        own = np.bincount(unit, weights=tokens, minlength=count)
        # In this thread, as a product of BLAS would wait for its other threads: 10 ms for a sum of 0.3 ms.
        size = np.concatenate([[own.sum()], np.einsum("ru,u->r", weights, own)])
        return cls(unit=unit, weights=weights, size=size)

    def sum_into(self, sums: ndarray, nats: ndarray) -> None:
        """Write the summed losses of documents [documents, K] in the sample and in each draw to `sums` [R + 1, K]."""
        if len(nats) > self.weights.shape[1]:  # some units are of several documents
            nats, documents = np.zeros((self.weights.shape[1], nats.shape[1])), nats
            np.add.at(nats, self.unit, documents)
        nats.sum(0, out=sums[0])
        np.matmul(self.weights, nats, out=sums[1:])


def units(run: RunLosses, domain: str) -> ndarray:
    """Return for each document of a domain the unit that is drawn, [N] from 0: its cluster where there are enough.

    With fewer clusters than `FEWEST_DOCUMENTS` single documents are drawn; the interval then holds for these sources
    only.
    """
    clusters = run.domains[domain].clusters
    names, index = np.unique(clusters, return_inverse=True)
    return index if len(names) >= FEWEST_DOCUMENTS else np.arange(len(clusters))


def few_clusters(run: RunLosses, domains: Sequence[str]) -> list[str]:
    """Return the domains whose documents belong to clusters, but to too few of them to draw."""
    found = []
    for domain in domains:
        clusters = run.domains[domain].clusters
        if len(np.unique(clusters)) < min(len(clusters), FEWEST_DOCUMENTS):
            found.append(domain)
    return found


def countable(documents: Mapping[str, int]) -> list[str]:
    """Return the tested domains whose held-out documents are enough for an interval, given their numbers."""
    return [name for name, count in documents.items() if count >= FEWEST_DOCUMENTS]


def enough(run: RunLosses, train: Sequence[str], test: Sequence[str]) -> bool:
    """Whether there are documents enough to draw, over the training domains together and in each tested one."""
    counts = {domain: len(losses.tokens) for domain, losses in run.domains.items()}
    seen = [counts[domain] for domain in train]
    smallest = min(sum(seen), *(counts[domain] for domain in test))
    return min(seen) >= FEWEST_OF_A_DOMAIN and smallest >= FEWEST_DOCUMENTS


def fewest_units(run: RunLosses, domains: Sequence[str]) -> int:
    """Return the number of units in the domain that has fewest."""
    return min(int(units(run, domain).max()) + 1 for domain in domains)


def draw(
    runs: Runs, train: Sequence[str], ood: Sequence[str], resamples: int, generator: np.random.Generator
) -> dict[tuple[str, int], Curve]:
    """Draw the documents of each domain once and read off the curves of all runs, which share their documents.

    x is the held-out loss over the training domains and y the loss on each unseen domain; without an unseen domain
    (mixed-domain studies) x is the training loss, which no document moves, and y the loss on each training domain.
    """
    if not runs:
        return {}
    found, tested = list(runs.values()), list(ood or train)
    ends = np.cumsum([len(run.trained) for run in found]).tolist()
    places = [slice(end - len(run.trained), end) for end, run in zip(ends, found, strict=True)]
    # Each run's curves lie together: they are read again for each row of the table.
    y = [np.empty((len(tested), resamples + 1, len(run.trained))) for run in found]
    held_out, tokens = np.zeros((resamples + 1, ends[-1])), np.zeros((resamples + 1, 1))
    sums = np.empty_like(held_out)
    for domain in (*train, *ood):
        draws = Draws.of(units(found[0], domain), found[0].domains[domain].tokens, resamples, generator)
        size = draws.size[:, None]
        # All runs at once: one large product of matrices takes half as long as many small ones, and all cores.
        draws.sum_into(sums, np.concatenate([run.domains[domain].nats for run in found], axis=1))
        if domain in train and ood:
            held_out += sums
            tokens += size
        if domain in tested:
            for own, at in zip(y, places, strict=True):
                np.divide(sums[:, at], size, out=own[tested.index(domain)])
    curves = {}
    for key, run, own, at in zip(runs, found, y, places, strict=True):
        x = held_out[:, at] / tokens if ood else np.broadcast_to(run.training, own.shape[1:])
        curves[key] = Curve(x=x, y=own, trained=run.trained)
    return curves
