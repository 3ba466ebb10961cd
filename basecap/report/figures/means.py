"""Runs of one architecture as their mean and a band from the lowest to the highest."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: A curve: (x, y) of its points, in any order.
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class MeanPoint:
    """The mean over runs of an architecture at x, the lowest and the highest of them, and how many have been there."""

    name: str
    x: float
    loss: float
    low: float
    high: float
    runs: int

    @property
    def between(self) -> str:
        """The lowest and the highest run in words."""
        return f"{self.low:.3f} … {self.high:.3f} ({self.runs} runs)" if self.runs > 1 else "one run"


def mean_and_band(name: str, runs: Sequence[Points], places: Sequence[float]) -> list[MeanPoint]:
    """Read the runs of an architecture off at `places`, straight lines between their points.

    Returns:
        A point per place, in the order of `places`; none where half of the runs or fewer have been.

    >>> (point,) = mean_and_band("a", [[(0, 1), (2, 3)], [(0, 3), (2, 5)]], [1, 9])
    >>> point.loss, point.low, point.high
    (3.0, 2.0, 4.0)
    """
    found = np.stack([_read_off(run, places) for run in runs])
    counts = np.sum(~np.isnan(found), axis=0)
    kept = 2 * counts > len(found)
    columns = found[:, kept]
    values = (np.nanmean(columns, axis=0), np.nanmin(columns, axis=0), np.nanmax(columns, axis=0), counts[kept])
    return [
        MeanPoint(name=name, x=x, loss=loss, low=low, high=high, runs=count)
        for x, loss, low, high, count in zip(
            np.asarray(places, dtype=float)[kept].tolist(), *(part.tolist() for part in values), strict=True
        )
    ]


def _read_off(run: Points, places: Sequence[float]) -> np.ndarray:
    x, y = np.array(sorted(run)).T
    return np.interp(places, x, y, left=np.nan, right=np.nan)
