"""Runs of one architecture as their mean and a band from the lowest to the highest."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: A curve: (x, y) of its points, in any order.
Points = Sequence[tuple[float, float]]


def mean_and_band(curves: Mapping[str, Sequence[Points]], places: Sequence[float]) -> list[dict[str, Any]]:
    """Read the runs of each architecture off at `places`, straight lines between their points.

    Returns:
        A row {"name", "x", "loss" (mean over runs), "low", "high" (of its runs), "runs"} per architecture and place, in
        the order of `places`; none where half of the runs or fewer have been.

    >>> mean_and_band({"a": [[(0, 1), (2, 3)], [(0, 3), (2, 5)]]}, [1.0, 9.0])
    [{'name': 'a', 'x': 1.0, 'loss': 3.0, 'low': 2.0, 'high': 4.0, 'runs': 2}]
    """
    rows = []
    for name, runs in curves.items():
        found = np.stack([_read_off(run, places) for run in runs])
        for place, values in zip(places, found.T, strict=True):
            there = values[~np.isnan(values)]
            if 2 * len(there) > len(values):
                ends = {"low": float(there.min()), "high": float(there.max()), "runs": len(there)}
                rows.append({"name": name, "x": float(place), "loss": float(there.mean()), **ends})
    return rows


def _read_off(run: Points, places: Sequence[float]) -> np.ndarray:
    x, y = np.array(sorted(run)).T
    return np.interp(places, x, y, left=np.nan, right=np.nan)
