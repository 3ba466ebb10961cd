"""Draws of held-out documents: one draw for every evaluation point of every run, for x and y alike.

Documents differ far more from each other than architectures do. As all curves are computed again in each draw, from
the same documents, the difficulty of single documents cancels in every difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.losses import RunLosses

#: With fewer independent documents (or clusters of them) an interval from drawing them is too narrow.
FEWEST_DOCUMENTS = 30
#: The same for one training domain among others. A domain of one document would not vary at all: where it held half
#: of the tokens, nominal 95 % intervals were true in 45 % of simulated studies.
FEWEST_OF_A_DOMAIN = 10

#: The losses of every run that has some, by architecture and seed.
Runs = dict[tuple[str, int], RunLosses]


@dataclass(frozen=True)
class Curve:
    """One run in R draws of documents, row 0 the sample itself: x [R + 1, K], y [R + 1, K, D], tokens trained [K]."""

    x: ndarray
    y: ndarray
    trained: ndarray


def resample(nats: ndarray, tokens: ndarray, generator: np.random.Generator, *, into: ndarray, size: ndarray) -> None:
    """Sum losses over units and over draws of units with replacement.

    Args:
        nats: [N, P] float64, the summed loss of each of N units (documents or clusters) at each of P points.
        tokens: [N] predicted tokens of each unit.
        generator: source of the draws.
        into: [R + 1, P], filled with the summed nats of R draws; row 0 is the sample itself.
        size: [R + 1], filled with their tokens.
    """
    count = len(tokens)
    into[0], size[0] = nats.sum(0), tokens.sum()
    rows = max(1, 4_000_000 // count)
    for first in range(1, len(into), rows):
        part = slice(first, min(first + rows, len(into)))
        some = part.stop - first
        drawn = generator.integers(count, size=(some, count)) + np.arange(some)[:, None] * count
        weights = np.bincount(drawn.ravel(), minlength=some * count).reshape(some, count).astype(np.float64)
        np.matmul(weights, nats, out=into[part])
        size[part] = weights @ tokens


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
    example = next(iter(runs.values()))
    ends = np.cumsum([len(run.trained) for run in runs.values()])
    # Arrays are filled in place, and the domains are first in memory: copies would take longer than the numbers.
    summed = np.empty((len((*train, *ood)), resamples + 1, ends[-1]))
    sizes = np.empty(summed.shape[:2])
    for domain, into, size in zip((*train, *ood), summed, sizes, strict=True):
        unit = units(example, domain)
        nats = np.concatenate([run.domains[domain].nats for run in runs.values()], axis=1)
        grouped = np.zeros((unit.max() + 1, nats.shape[1]))
        np.add.at(grouped, unit, nats)
        tokens = np.bincount(unit, weights=example.domains[domain].tokens)
        resample(grouped, tokens, generator, into=into, size=size)
    if ood:
        seen = len(train)
        x = summed[:seen].sum(0) / sizes[:seen].sum(0)[:, None]
        summed, sizes = summed[seen:], sizes[seen:]
    else:
        x = np.broadcast_to(np.concatenate([run.training for run in runs.values()]), summed.shape[1:])
    summed /= sizes[..., None]
    y = np.moveaxis(summed, 0, -1)
    parts = zip(runs, np.split(x, ends[:-1], axis=1), np.split(y, ends[:-1], axis=1), strict=True)
    return {key: Curve(x=own_x, y=own_y, trained=runs[key].trained) for key, own_x, own_y in parts}
