"""The losses of single documents of a run, over all its evaluation points."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.training_log import TrainingLog
from basecap.errors import DataError
from basecap.records import DocumentLosses, Record, RunRecords

#: The evaluation that the gap is made of.
EVALUATION = "domain-loss"


@dataclass(frozen=True)
class DomainLosses:
    """One domain at K evaluation points: summed nats [N, K]; predicted tokens, their bytes, clusters [N]."""

    nats: ndarray
    tokens: ndarray
    bytes: ndarray
    clusters: ndarray


@dataclass(frozen=True)
class RunLosses:
    """One run's K evaluation points: tokens trained on [K], smoothed training loss [K], losses by domain.

    `finished` says whether it has trained to its end.
    """

    trained: ndarray
    training: ndarray
    domains: dict[str, DomainLosses]
    finished: bool = True

    def same_documents(self, other: "RunLosses") -> bool:
        """Whether both were evaluated on the same documents, so that they may be compared one by one."""
        return all(
            domain in other.domains
            and np.array_equal(mine.tokens, other.domains[domain].tokens)
            and np.array_equal(mine.bytes, other.domains[domain].bytes)
            for domain, mine in self.domains.items()
        )


def load(run: RunRecords, evals: Iterable[Record], log: TrainingLog, domains: Sequence[str]) -> RunLosses | None:
    """Read a run's losses; None when it has no evaluation point with finite losses.

    Points with a loss that is not finite are left out: no mean over documents can hold one.

    Raises:
        DataError: a file is missing or damaged, or the documents changed between evaluation points.
    """
    trained = {record.step: record.tokens for record in evals if record.eval == EVALUATION}
    points = {step: run.documents(EVALUATION, step) for step in sorted(trained)}
    for step, found in points.items():
        for domain in domains:
            if domain not in found:
                raise DataError(f"{run.path}: no documents of {domain!r} at step {step}; evaluate that step again.")
    finite = [
        step
        for step, found in points.items()
        if all(np.isfinite(found[domain].nats).all() and found[domain].tokens.sum() > 0 for domain in domains)
    ]
    if not finite:
        return None
    losses = {domain: _joined(run, domain, [points[step][domain] for step in finite]) for domain in domains}
    return RunLosses(
        trained=np.array([trained[step] for step in finite]),
        training=log.smoothed_loss(finite),
        domains=losses,
        finished=run.info().get("status") == "finished",
    )


def _joined(run: RunRecords, domain: str, found: Sequence[DocumentLosses]) -> DomainLosses:
    first = found[0]
    if any(not np.array_equal(first.tokens, other.tokens) for other in found):
        raise DataError(
            f"{run.path}: the documents of {domain!r} changed between evaluation points; train this run again."
        )
    nats = np.stack([part.nats for part in found]).T
    return DomainLosses(nats=nats, tokens=first.tokens, bytes=first.bytes, clusters=first.clusters)
