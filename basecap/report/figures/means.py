"""Runs of one architecture as their mean and a band from the lowest to the highest."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from basecap.report.figures.spec import Datum


def mean_and_band(name: str, runs: Sequence[ndarray], places: Sequence[float]) -> list[Datum]:
    """Read the runs of an architecture off at `places`, straight lines between their points.

    Args:
        name: of the architecture.
        runs: a curve each, x and y [2, points] in the order of x.
        places: to read off at.

    Returns:
        A row per place, in the order of `places`: the mean over the runs that have been there, the lowest and the
        highest of them, and how many they are; none where half of the runs or fewer have been.

    >>> (row,) = mean_and_band("a", np.array([[[0, 2], [1, 3]], [[0, 2], [3, 5]]]), [1, 9])
    >>> row["loss"], row["low"], row["high"]
    (3.0, 2.0, 4.0)
    """
    found = np.stack([np.interp(places, x, y, left=np.nan, right=np.nan) for x, y in runs])
    counts = np.count_nonzero(~np.isnan(found), axis=0)
    kept = 2 * counts > len(found)
    columns, counts = found[:, kept], counts[kept]
    values = (
        np.asarray(places)[kept],
        np.nansum(columns, axis=0) / counts,
        np.fmin.reduce(columns),
        np.fmax.reduce(columns),
        counts,
    )
    return [
        {"name": name, "x": x, "loss": loss, "low": low, "high": high, "runs": count}
        for x, loss, low, high, count in zip(*(part.tolist() for part in values), strict=True)
    ]


def between(row: Mapping[str, Any]) -> str:
    """Return the lowest and the highest run of a row in words."""
    return f"{row['low']:.3f} … {row['high']:.3f} ({row['runs']} runs)" if row["runs"] > 1 else "one run"
