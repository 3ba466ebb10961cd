"""The losses of single documents of a run, over all its evaluation points."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import mean

import numpy as np
from numpy import ndarray

from basecap.analysis.rows import grouped
from basecap.analysis.text.class_losses import ClassLosses, class_losses
from basecap.analysis.training_log import TrainingLog
from basecap.errors import DataError
from basecap.records import RunRecords
from basecap.records.documents import History
from basecap.records.measured import Record

#: The evaluation that the gap is made of.
EVALUATION = "domain-loss"
#: The evaluation that tells whether a model is mature.
COPYING = "copying"
#: Evaluation points of a run that are drawn and fitted, at most: more take time and say the same.
MOST_POINTS = 40
#: Relative difference between a recorded loss and that of its documents, at most: archives round the documents' losses,
#: to eight nats at the coarsest (results/figures), which moves their mean by up to 1.7e-4.
ROUNDING = 2e-4


@dataclass(frozen=True)
class DomainLosses:
    """One domain at K evaluation points: summed nats [N, K]; predicted tokens, their bytes, clusters [N].

    `classes` is what classes of tokens contribute, None where no point has them.
    """

    nats: ndarray
    tokens: ndarray
    bytes: ndarray
    clusters: ndarray
    classes: ClassLosses | None = None

    def mapped(self, means: Callable[[ndarray], ndarray]) -> "DomainLosses":
        """Return it with its points, the last axis of losses, replaced."""
        classes = self.classes and replace(self.classes, nats=means(self.classes.nats))
        return replace(self, nats=means(self.nats), classes=classes)


@dataclass(frozen=True)
class RunLosses:
    """One run's K evaluation points: tokens trained on [K], smoothed training loss [K], losses by domain.

    `finished` says whether it has trained to its end. `copying` [K] is the share of copying, a mean over domains, NaN
    where it was not measured; None where it never was.
    """

    trained: ndarray
    training: ndarray
    domains: dict[str, DomainLosses]
    finished: bool = True
    copying: ndarray | None = None

    def same_documents(self, other: "RunLosses") -> bool:
        """Whether both were evaluated on the same documents, so that they may be compared one by one."""
        return all(
            domain in other.domains
            and np.array_equal(mine.tokens, other.domains[domain].tokens)
            and np.array_equal(mine.bytes, other.domains[domain].bytes)
            for domain, mine in self.domains.items()
        )

    def same_losses(self, other: "RunLosses") -> bool:
        """Whether the last losses of all documents are equal to the bit: two seeds that are one run."""
        return all(
            domain in other.domains and np.array_equal(mine.nats[:, -1], other.domains[domain].nats[:, -1])
            for domain, mine in self.domains.items()
        )

    def shortened(self) -> "RunLosses":
        """Return it with `MOST_POINTS` evaluation points at most: means of neighbours, the last point by itself."""
        count = len(self.trained)
        if count <= MOST_POINTS:
            return self
        first = np.linspace(0, count - 1, MOST_POINTS).astype(int)
        sizes = np.diff(first, append=count)

        def means(values: ndarray) -> ndarray:
            return np.add.reduceat(values, first, axis=-1) / sizes

        domains = {name: losses.mapped(means) for name, losses in self.domains.items()}
        copying = None if self.copying is None else means(self.copying)
        trained, training = means(self.trained), means(self.training)
        return replace(self, trained=trained, training=training, domains=domains, copying=copying)


def load(run: RunRecords, evals: Sequence[Record], log: TrainingLog, domains: Sequence[str]) -> RunLosses | None:
    """Read a run's losses, shortened; None when it has no evaluation point with finite losses.

    Points with a loss that is not finite are left out: no mean over documents can hold one.

    Raises:
        DataError: a file is missing or damaged, evals.jsonl says other losses than the documents, or the documents
            changed between evaluation points.
    """
    trained = {record.step: record.tokens for record in evals if record.eval == EVALUATION}
    found = run.documents(EVALUATION, trained)
    for history in found:
        for domain in domains:
            if domain not in history.documents.subsets:
                step = history.steps[0]
                raise DataError(f"{run.path}: no documents of {domain!r} at step {step}; evaluate that step again.")
    _refuse_other_losses(run, evals, found)
    finite = {step for history in found for step in _finite(history, domains)}
    if not finite:
        return None
    kept = sorted((history for history in found if finite.intersection(history.steps)), key=lambda one: min(one.steps))
    steps = sorted(finite)
    places = {step: place for place, step in enumerate(step for history in kept for step in history.steps)}
    order = [places[step] for step in steps]
    own = [record for record in evals if record.eval == EVALUATION]
    losses = RunLosses(
        trained=np.array([trained[step] for step in steps]),
        training=log.smoothed_loss(steps),
        domains={
            domain: replace(_joined(run, domain, kept, order), classes=class_losses(own, domain, steps))
            for domain in domains
        },
        finished=run.finished or trained[steps[-1]] >= (run.budget or math.inf),  # its leak test may be to come
        copying=_copying(evals, steps),
    )
    return losses.shortened()


def _refuse_other_losses(run: RunRecords, evals: Sequence[Record], found: Sequence[History]) -> None:
    """Raise DataError where a loss in evals.jsonl is not that of its documents, which gaps are made of."""
    recorded = {
        (record.step, record.subset): record.value
        for record in evals
        if (record.eval, record.metric) == (EVALUATION, "loss")
    }
    for history in found:
        for domain, place in history.documents.subsets.items():
            tokens = history.documents.tokens[place].sum()
            for step, nats in zip(history.steps, history.nats[:, place].sum(1).tolist(), strict=True):
                value = recorded.get((step, domain), math.nan)
                if tokens and abs(value - nats / tokens) > ROUNDING * abs(value):  # false for NaN
                    raise DataError(
                        f"{run.path / 'evals.jsonl'} says a loss of {value:.6g} on {domain!r} at step {step}, and its "
                        f"documents have {nats / tokens:.6g}; restore the file, or remove {run.path} to train it again."
                    )


def joined(parts: Sequence[RunLosses]) -> RunLosses | None:
    """Return the evaluation points of all parts of a run, one part after the other; None without parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    domains = {name: _one_after_another([part.domains[name] for part in parts]) for name in parts[0].domains}
    known = [np.full(len(part.trained), np.nan) if part.copying is None else part.copying for part in parts]
    found = RunLosses(
        trained=np.concatenate([part.trained for part in parts]),
        training=np.concatenate([part.training for part in parts]),
        domains=domains,
        finished=all(part.finished for part in parts),
        copying=np.concatenate(known) if any(part.copying is not None for part in parts) else None,
    )
    return found.shortened()


def _one_after_another(parts: Sequence[DomainLosses]) -> DomainLosses:
    classes = [part.classes for part in parts]
    found = [part for part in classes if part is not None]
    nats = np.concatenate([part.nats for part in parts], axis=1)
    if len(found) < len(parts):
        return replace(parts[0], nats=nats, classes=None)
    joint = replace(found[0], nats=np.concatenate([part.nats for part in found], axis=1))
    return replace(parts[0], nats=nats, classes=joint)


def _copying(evals: Sequence[Record], steps: Sequence[int]) -> ndarray | None:
    """Return the mean share of copying over the domains at each step; NaN without one, None where there is none."""
    shares = grouped((record for record in evals if record.eval == COPYING), attrgetter("step"))
    found = [mean(record.value for record in shares[step]) if step in shares else math.nan for step in steps]
    return np.array(found) if np.isfinite(found).any() else None


def _finite(history: History, domains: Sequence[str]) -> list[int]:
    """Return the steps at which every document has a finite loss; none where a domain has nothing to predict."""
    places = [history.documents.subsets[domain] for domain in domains]
    if any(history.documents.tokens[place].sum() == 0 for place in places):
        return []
    kept = np.all([np.isfinite(history.nats[:, place]).all(1) for place in places], axis=0)
    return [step for step, keep in zip(history.steps, kept.tolist(), strict=True) if keep]


def _joined(run: RunRecords, domain: str, found: Sequence[History], order: Sequence[int]) -> DomainLosses:
    """Return the losses on a domain, its points in `order`; raises DataError where its documents changed."""
    places = [history.documents.subsets[domain] for history in found]
    tokens, sizes, clusters = (
        [getattr(history.documents, name)[place] for history, place in zip(found, places, strict=True)]
        for name in ("tokens", "bytes", "clusters")
    )
    if any(not np.array_equal(tokens[0], other) for other in tokens):
        raise DataError(
            f"{run.path}: the documents of {domain!r} changed between evaluation points; train this run again."
        )
    parts = [history.nats[:, place] for history, place in zip(found, places, strict=True)]
    nats = parts[0] if len(parts) == 1 else np.concatenate(parts)
    nats = nats if [*order] == [*range(len(nats))] else nats[order]  # nothing to copy where a run was never resumed
    return DomainLosses(nats=nats.T, tokens=tokens[0], bytes=sizes[0], clusters=clusters[0])
