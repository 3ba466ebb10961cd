"""How much of a gap lies in each class of tokens: those that a copy from the context predicts, misleads, or new ones.

The loss of a domain is the sum of what its classes contribute. They are read off the same fitted curves as the loss
itself, over the same range, and that fit is linear in the loss: so the parts add up to the gap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.rows import Estimate, GapPart, Interval
from basecap.analysis.student import student_quantile
from basecap.analysis.text import gap
from basecap.analysis.text.draws import Curve
from basecap.analysis.text.gap import Range
from basecap.analysis.text.losses import RunLosses
from basecap.records.token_classes import CLASSES

#: Probability that the interval of a part, for this part alone, leaves out what other runs would give.
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class ClassLevels:
    """What classes contribute to the mean losses of runs over a range, [n, C, D]: of a row's and of the reference's.

    `tokens` [C, D] are the shares of the classes.
    """

    own: ndarray
    reference: ndarray
    tokens: ndarray


def class_levels(
    own: Sequence[tuple[RunLosses, Curve]],
    reference: Sequence[tuple[RunLosses, Curve]],
    where: Range,
    tested: Sequence[str],
) -> ClassLevels | None:
    """Return what classes of tokens contribute to losses over a range.

    None where a run has evaluation points near it that were recorded without classes: then parts would not add up.

    Args:
        own, reference: runs with their curves, which may end before the runs do.
        where: the range.
        tested: the domains of the gap.
    """
    levels = [[_level(run, curve, where, tested) for run, curve in some] for some in (own, reference)]
    mine, theirs = ([level for level in some if level is not None] for some in levels)
    if [len(mine), len(theirs)] != [len(own), len(reference)]:
        return None
    classes = [reference[0][0].domains[domain].classes for domain in tested]
    tokens = np.stack([found.tokens for found in classes if found is not None], axis=1)
    return ClassLevels(own=np.array(mine), reference=np.array(theirs), tokens=tokens)


def _level(run: RunLosses, curve: Curve, where: Range, tested: Sequence[str]) -> ndarray | None:
    """Return the contributions of classes to the mean loss of a run over a range, [C, D]; None without classes."""
    found = [run.domains[domain].classes for domain in tested]
    nats = [classes.nats[:, : len(curve.trained)] for classes in found if classes is not None]
    if len(nats) < len(found):
        return None
    y = np.stack(nats, axis=1)
    known = np.isfinite(y).all((0, 1))
    if not known[gap.within_reach(curve, where)].all():
        return None
    parts = Curve(x=curve.x[:1, known], y=y.reshape(-1, 1, y.shape[-1])[..., known], trained=curve.trained[known])
    mean, _ = gap.level(parts, Range(low=where.low[:1], high=where.high[:1]))
    return mean[0].reshape(y.shape[:2])


def gap_parts(levels: ClassLevels, weights: ndarray, whole: Interval) -> tuple[GapPart, ...]:
    """Return the parts of the gap `whole`, which is the mean over domains with `weights` [D].

    Their intervals are Welch's over runs, for each part alone. They need two runs of each architecture.
    """
    own, reference = levels.own @ weights, levels.reference @ weights
    certain = whole.low > 0 or whole.high < 0
    return tuple(
        GapPart(
            name=name,
            **vars(_difference(own[:, place], reference[:, place])),
            tokens=float(levels.tokens[place] @ weights),
            share=float(own[:, place].mean() - reference[:, place].mean()) / whole.value if certain else None,
        )
        for place, name in enumerate(CLASSES)
    )


def _difference(own: ndarray, reference: ndarray) -> Estimate:
    """Return the difference of two means over runs, with an interval where both have two runs."""
    value = float(own.mean() - reference.mean())
    if min(len(own), len(reference)) < 2:
        return Estimate(value=value, low=None, high=None)
    errors = [float(values.var(ddof=1)) / len(values) for values in (own, reference)]
    variance = sum(errors)
    if variance == 0:
        return Estimate(value=value, low=value, high=value)
    counts = len(own), len(reference)
    freedom = variance**2 / sum(error**2 / (count - 1) for error, count in zip(errors, counts, strict=True))
    half = math.sqrt(variance) * student_quantile(freedom, 1 - LEVEL / 2)
    return Estimate(value=value, low=value - half, high=value + half)
