"""The losses of single documents of a run, over all its checkpoints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.errors import DataError
from basecap.records import DocumentLosses, Record, RunRecords

#: The evaluation that the gap is made of.
EVALUATION = "domain-loss"


@dataclass(frozen=True)
class RunLosses:
    """One run's K evaluated checkpoints: tokens trained on [K], and per domain nats [N, K], tokens and bytes [N]."""

    trained: ndarray
    domains: dict[str, DocumentLosses]

    def same_documents(self, other: "RunLosses") -> bool:
        """Whether both were evaluated on the same documents, so that they may be compared one by one."""
        return all(
            domain in other.domains
            and np.array_equal(mine.tokens, other.domains[domain].tokens)
            and np.array_equal(mine.bytes, other.domains[domain].bytes)
            for domain, mine in self.domains.items()
        )


def load(run: RunRecords, evals: Iterable[Record], domains: Sequence[str]) -> RunLosses | None:
    """Read a run's losses; None when it has no checkpoint with finite losses.

    Checkpoints with a loss that is not finite are left out: no mean over documents can hold one.

    Raises:
        DataError: a file is missing or damaged, or the documents changed between checkpoints.
    """
    trained = {record.step: record.tokens for record in evals if record.eval == EVALUATION}
    checkpoints = {step: run.documents(EVALUATION, step) for step in sorted(trained)}
    for step, found in checkpoints.items():
        for domain in domains:
            if domain not in found:
                raise DataError(
                    f"{run.path}: no documents of {domain!r} at step {step}; evaluate that checkpoint again."
                )
    finite = [
        step
        for step, found in checkpoints.items()
        if all(np.isfinite(found[domain].nats).all() and found[domain].tokens.sum() > 0 for domain in domains)
    ]
    if not finite:
        return None
    losses = {}
    for domain in domains:
        first = checkpoints[finite[0]][domain]
        if any(not np.array_equal(first.tokens, checkpoints[step][domain].tokens) for step in finite):
            raise DataError(f"{run.path}: the documents of {domain!r} changed between checkpoints; train it anew.")
        nats = np.stack([checkpoints[step][domain].nats for step in finite], axis=1)
        losses[domain] = DocumentLosses(nats=nats, tokens=first.tokens, bytes=first.bytes)
    return RunLosses(trained=np.array([trained[step] for step in finite]), domains=losses)
