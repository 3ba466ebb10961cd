"""How much of a gap lies in each class of tokens: those that a copy from the context predicts, misleads, or new ones.

The gap of a domain is the difference of two losses at equal held-out loss. Its loss is the sum of what its classes
contribute, so the gap is the sum of the differences of these contributions. They are read from the records of
`domain-loss`, see `basecap.records.token_classes`; records of earlier versions lack them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.text.losses import EVALUATION
from basecap.records.measured import Record
from basecap.records.token_classes import CLASSES, loss_metric

#: Held-out losses at which curves are compared, evenly spaced over a range.
PLACES = 50


@dataclass(frozen=True)
class ClassCurve:
    """A run at K evaluation points, by ascending held-out loss [K].

    `parts` [K, C] is what each class of tokens contributes to the loss of the tested domains, a mean over them, and
    `tokens` [C] the share of their tokens, likewise.
    """

    held_out: ndarray
    parts: ndarray
    tokens: ndarray


@dataclass(frozen=True, kw_only=True)
class ClassGap:
    """The part of a gap that lies in a class of tokens.

    Attributes:
        name: the class.
        tokens: share of the tokens.
        gap: what it contributes to the gap in nats per token, of all classes together; the parts add up to the gap.
        error: standard error of `gap` over runs, None for fewer than two runs of either architecture.
        share: of the gap; parts of other signs than the gap have negative shares. None where the gap is 0.
    """

    name: str
    tokens: float
    gap: float
    error: float | None
    share: float | None


def class_curve(evals: Sequence[Record], train: Sequence[str], tested: Sequence[str]) -> ClassCurve | None:
    """Return the contributions of classes at a run's evaluation points, None where no point has them.

    Args:
        evals: all records of the run; of a run with schedule wsd those of its branches.
        train: the training domains, whose loss is the held-out loss.
        tested: the domains of the gap.
    """
    found: dict[int, dict[tuple[str, str], Record]] = {}
    for record in evals:
        if record.eval == EVALUATION:
            found.setdefault(record.step, {})[record.subset, record.metric] = record
    held_out, parts, tokens = [], [], []
    for records in found.values():
        known = all((domain, "loss") in records for domain in train)
        if not (known and all(_has_classes(records, domain) for domain in tested)):
            continue
        nats, counts = np.transpose([_loss(records, domain) for domain in train])
        held_out.append(nats.sum() / counts.sum())
        parts.append(np.mean([_contributions(records, domain)[0] for domain in tested], axis=0))
        tokens.append(np.mean([_contributions(records, domain)[1] for domain in tested], axis=0))
    finite = [place for place, row in enumerate(parts) if np.isfinite([held_out[place], *row]).all()]
    if not finite:
        return None
    order = sorted(finite, key=lambda place: held_out[place])
    return ClassCurve(np.array(held_out)[order], np.array(parts)[order], tokens[order[0]])


def class_gaps(own: Sequence[ClassCurve], reference: Sequence[ClassCurve], low: float, high: float) -> list[ClassGap]:
    """Return the parts of a gap by class, means over held-out losses from `low` to `high` that all runs reach.

    Curves are interpolated linearly, so the parts add up to the gap of the interpolated losses. Empty where no
    held-out loss of the range is reached by all runs.
    """
    curves = [*own, *reference]
    low = max([low, *(curve.held_out[0] for curve in curves)])
    high = min([high, *(curve.held_out[-1] for curve in curves)])
    if not (own and reference and low < high):
        return []
    places = np.linspace(low, high, PLACES)
    mine, theirs = (np.array([_level(curve, places) for curve in some]) for some in (own, reference))
    gaps = mine.mean(axis=0) - theirs.mean(axis=0)
    errors = None
    if min(len(own), len(reference)) > 1:
        errors = np.sqrt(sum(levels.var(axis=0, ddof=1) / len(levels) for levels in (mine, theirs)))
    whole = float(gaps.sum())
    return [
        ClassGap(
            name=name,
            tokens=float(reference[0].tokens[number]),
            gap=float(gaps[number]),
            error=None if errors is None else float(errors[number]),
            share=float(gaps[number]) / whole if whole else None,
        )
        for number, name in enumerate(CLASSES)
    ]


def _level(curve: ClassCurve, places: ndarray) -> ndarray:
    """Return the mean contributions of a run at held-out losses `places`: [C]."""
    return np.array([np.interp(places, curve.held_out, part).mean() for part in curve.parts.T])


def _has_classes(records: dict[tuple[str, str], Record], domain: str) -> bool:
    return (domain, "loss") in records and any((domain, loss_metric(name)) in records for name in CLASSES)


def _loss(records: dict[tuple[str, str], Record], domain: str) -> tuple[float, int]:
    """Return the nats and the tokens of a domain."""
    record = records[domain, "loss"]
    return record.value * record.n, record.n


def _contributions(records: dict[tuple[str, str], Record], domain: str) -> tuple[ndarray, ndarray]:
    """Return what each class contributes to the loss of a domain, and its share of the tokens: [C] each."""
    whole = records[domain, "loss"].n
    own = [records.get((domain, loss_metric(name))) for name in CLASSES]
    counts = np.array([0 if record is None else record.n for record in own]) / whole
    return np.array([0.0 if record is None else record.value for record in own]) * counts, counts
