"""What each class of tokens contributes to the loss of a domain, from the records of `domain-loss`.

The classes are those of `basecap.records.token_classes`; records of earlier versions lack them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.records.measured import Record
from basecap.records.token_classes import CLASSES, loss_metric


@dataclass(frozen=True)
class ClassLosses:
    """What C classes of tokens contribute to a domain's loss at K evaluation points, and their shares of its tokens.

    `nats` [C, K] in nats per token of the domain, so that the classes add up to its loss; NaN at points without
    classes. `tokens` [C].
    """

    nats: ndarray
    tokens: ndarray


def class_losses(records: Iterable[Record], domain: str, steps: Sequence[int]) -> ClassLosses | None:
    """Return the contributions to the loss of a domain at each step; None where none of the steps has classes.

    Args:
        records: of `domain-loss`.
        domain: their subset.
        steps: of the evaluation points.
    """
    found: dict[int, dict[str, Record]] = {}
    for record in records:
        if record.subset == domain:
            found.setdefault(record.step, {})[record.metric] = record
    nats, tokens = [], []
    for step in steps:
        own = found.get(step, {})
        classes = [own.get(loss_metric(name)) for name in CLASSES]
        if "loss" not in own or not own["loss"].n or not any(classes):
            nats.append([math.nan] * len(CLASSES))
            continue
        # A class without tokens has no record.
        shares = [0.0 if record is None else record.n / own["loss"].n for record in classes]
        nats.append([0.0 if one is None else one.value * share for one, share in zip(classes, shares, strict=True)])
        tokens.append(shares)
    return ClassLosses(nats=np.array(nats).T, tokens=np.array(tokens[0])) if tokens else None
