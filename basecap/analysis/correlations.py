"""How the gap correlates with other measures: over architectures, and over the runs of each architecture."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from basecap.analysis.rows import Estimate, Interval

#: Fewest architectures for a correlation. In simulated samples of 7 to 20 the intervals were true in 94 to 98 %, of 5
#: and 6 in as little as 75 %.
FEWEST = 7
#: Draws of architectures behind the interval of a correlation, and their seed.
DRAWS, SEED = 2_000, 0
#: Fewest degrees of freedom for a correlation within architectures, and the largest that has a logarithm.
FEWEST_FREEDOM, LARGEST = 5, 1 - 1e-12


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number per architecture.

    Attributes:
        name: what is measured, such as "gap" or "recall on mqar".
        kind: the gap, another score, or a cost.
        unit: of the numbers.
        better: which direction is.
        source: the study with its scale, or the device and the load of a cost file.
        values: by architecture; ends are None without an interval.
        by_run: of each run, by architecture and seed; empty where runs have no numbers of their own.
    """

    name: str
    kind: Literal["gap", "score", "cost"]
    unit: str
    better: Literal["lower", "higher", "neither"]
    source: str
    values: dict[str, Estimate]
    by_run: dict[str, dict[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """The correlation of the gap with another measure.

    Attributes:
        gap, other: the two measures, as "name, source".
        architectures: how many have both.
        value: Spearman's rank correlation over architectures with its interval; None with fewer than `FEWEST`
            architectures or without differences.
        runs: how many runs have both, of architectures with two such runs or more.
        within: the correlation over these runs of what sets each apart from the mean of its architecture, with its
            interval; None for too few runs or without differences.
    """

    gap: str
    other: str
    architectures: int
    value: Interval | None
    runs: int
    within: Interval | None


def correlations(measures: Sequence[Measure]) -> Iterator[Correlation]:
    """Yield the correlation of the gap with each score."""
    gaps = [measure for measure in measures if measure.kind == "gap"]
    for other in measures if gaps else ():
        if other.kind != "score":
            continue
        gap = gap_beside(gaps, other)
        names = [name for name in gap.values if name in other.values]
        pairs = np.array([[gap.values[name].value, other.values[name].value] for name in names]).reshape(-1, 2)
        groups = _groups(gap.by_run, other.by_run) if gap.source == other.source else []
        yield Correlation(
            gap=f"{gap.name}, {gap.source}",
            other=f"{other.name}, {other.source}",
            architectures=len(names),
            value=spearman(pairs[:, 0], pairs[:, 1]) if len(names) >= FEWEST else None,
            runs=sum(len(group) for group in groups),
            within=within(groups),
        )


def gap_beside(gaps: Sequence[Measure], other: Measure) -> Measure:
    """Return the gap to relate a score or cost to: that of the same study if it has one, else the first."""
    return next((gap for gap in gaps if gap.source == other.source), gaps[0])


def _groups(
    first: Mapping[str, Mapping[int, float]], second: Mapping[str, Mapping[int, float]]
) -> list[NDArray[np.float64]]:
    """Return both numbers of the runs of each architecture, [n, 2], where there are two such runs or more."""
    shared = {name: sorted(first[name].keys() & second[name].keys()) for name in first.keys() & second.keys()}
    return [
        np.array([[first[name][seed], second[name][seed]] for seed in shared[name]])
        for name in first
        if len(shared.get(name, [])) > 1
    ]


def within(groups: Sequence[NDArray[np.float64]]) -> Interval | None:
    """Return the correlation within groups of pairs, each [n, 2], with its 95 % interval.

    Means of groups are removed, so that only what differs between runs of one architecture counts. The interval is
    Fisher's, for a correlation of normal numbers with one parameter per group removed. None for fewer than
    `FEWEST_FREEDOM` degrees of freedom, or where one of the two is constant.
    """
    freedom = sum(len(group) - 1 for group in groups) - 2
    if freedom < FEWEST_FREEDOM:
        return None
    x, y = np.concatenate([group - group.mean(0) for group in groups]).T
    scale = math.sqrt((x @ x) * (y @ y))
    if scale == 0:
        return None
    value = float(np.clip(x @ y / scale, -1, 1))
    middle, reach = math.atanh(np.clip(value, -LARGEST, LARGEST)), NormalDist().inv_cdf(0.975) / math.sqrt(freedom)
    return Interval(value=value, low=math.tanh(middle - reach), high=math.tanh(middle + reach))


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> Interval | None:
    """Return Spearman's rank correlation of x and y [n] with its 95 % interval; None where one of them is constant.

    Ranks, as the relation need not be a line. The interval is the percentile bootstrap over architectures: it holds for
    architectures like these, and with few of them it is rough. Draws in which x or y is constant do not count.
    """
    value = _rank_correlation(x[None], y[None])[0]
    if not np.isfinite(value):
        return None
    drawn = np.random.default_rng(SEED).integers(len(x), size=(DRAWS, len(x)))
    values = _rank_correlation(x[drawn], y[drawn])
    low, high = np.quantile(values[np.isfinite(values)], (0.025, 0.975))
    return Interval(value=float(value), low=float(low), high=float(high))


def _rank_correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the correlation of ranks within each row of x and y [R, n], [R]; NaN where a row is constant."""
    a, b = (_centred_ranks(values) for values in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


def _centred_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks within each row minus their mean, equal values sharing theirs."""
    below = (values[:, None, :] < values[:, :, None]).sum(2)
    above = (values[:, None, :] > values[:, :, None]).sum(2)
    return (below - above) / 2.0
