"""Intervals of shares of right answers, and of sums and differences of them over cells.

The examples of a cell are what chance draws: values of one example may be right or wrong together, so a share of values
has the interval of as many examples (the variance of a mean of values within [0, 1] is never larger). One cell has
Wilson's interval (JASA 22, 1927). A weighted sum of cells combines their distances to the ends as the squares of
independent errors add up (Zou and Donner, Statistics in Medicine 27, 2008), which needs no variance and so stays
sensible where every answer is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from basecap.analysis.results import AnswerRow
from basecap.analysis.rows import LEVEL, Interval
from basecap.analysis.student import student_quantile

Key = TypeVar("Key")


@dataclass(frozen=True)
class Share:
    """A share of right answers, and how many independent examples it is of."""

    value: float
    examples: int


def wilson(share: Share) -> tuple[float, float]:
    """Return the ends of Wilson's interval of a share.

    >>> [round(end, 4) for end in wilson(Share(1.0, 100))]
    [0.963, 1.0]
    """
    z = NormalDist().inv_cdf(1 - LEVEL / 2)
    p, n = share.value, share.examples
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(max(p * (1 - p), 0.0) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def estimate(units: Sequence[Mapping[Key, Share]], weights: Mapping[Key, float]) -> Interval:
    """Estimate a weighted sum of shares: the mean over runs, and an interval.

    All runs answer the same examples, so their scatter leaves out what other examples would change: with two runs or
    more the interval is Student's t interval over runs, and never narrower than what the examples alone leave open.

    Args:
        units: the shares of each run, at least one; every key of `weights` is in each.
        weights: of the shares; a mean has weights that add up to 1, a difference weights of both signs.
    """
    values = np.array([sum(weight * unit[key].value for key, weight in weights.items()) for unit in units])
    value = float(values.mean())
    below = above = 0.0
    for key, weight in weights.items():
        shares = [unit[key] for unit in units]
        pooled = Share(float(np.mean([share.value for share in shares])), min(share.examples for share in shares))
        down, up = (abs(end - pooled.value) for end in wilson(pooled))
        if weight < 0:
            down, up = up, down
        below += (weight * down) ** 2
        above += (weight * up) ** 2
    scatter = 0.0
    if len(values) > 1:
        scatter = student_quantile(len(values) - 1, 1 - LEVEL / 2) * float(values.std(ddof=1)) / sqrt(len(values))
    least, most = (sum(sign * max(0.0, sign * weight) for weight in weights.values()) for sign in (-1, 1))
    low, high = value - max(sqrt(below), scatter), value + max(sqrt(above), scatter)
    return Interval(value=value, low=float(max(low, least)), high=float(min(high, most)))


def over_runs(rows: Sequence[AnswerRow]) -> Interval:
    """Return the mean of one share over runs, one row of each, and its interval (see `estimate`)."""
    return estimate([{None: Share(row.value or 0.0, row.n)} for row in rows], {None: 1.0})
