"""What is measured of the architectures of a study: settings, the reference, and the levels of the others."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy import ndarray

from basecap.analysis.rows import LEVEL, CopyingShares, LeftOut, Maturity, Verdict
from basecap.analysis.text import gap
from basecap.analysis.text.draws import Curve
from basecap.analysis.text.gap import LOST_DRAWS, Range
from basecap.analysis.text.intervals import Levels
from basecap.analysis.text.noise import DRAWS
from basecap.analysis.text.token_classes import ClassLevels
from basecap.analysis.text.worth import Lines


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a comparison is about.

    Attributes:
        reference: the architecture that the others are compared with.
        train, ood: domains; without unseen ones the rows say what differs at equal training loss, with no verdict.
        share: of the reference's tokens after which its models count as trained (`gap.from`).
        cost: share of the reference's tokens that a gap may be worth and still keep the capability (`gap.cost`).
        level: probability that the intervals of a table leave out something true.
        resamples: draws of documents.
        draws: of errors, behind each interval.
        bigram: held-out loss of a bigram model on the training domains, None where it was not measured.
        waiting: whether the reference has not run.
        failed: architectures with a run that failed.
        seconds: training time of one run by architecture.
    """

    reference: str
    train: Sequence[str]
    ood: Sequence[str]
    share: float = 0.5
    cost: float = 0.1
    level: float = LEVEL
    resamples: int = 2000
    draws: int = DRAWS
    bigram: float | None = None
    waiting: bool = False
    failed: Collection[str] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def tested(self) -> Sequence[str]:
        """The domains on which gaps are measured."""
        return self.ood or self.train

    @property
    def loss(self) -> str:
        """How the loss is called at which architectures are compared."""
        return "held-out" if self.ood else "training"

    @property
    def open(self) -> Verdict:
        """The verdict of a row that ran but has no gap."""
        return "undecided" if self.ood else "none"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The reference's runs that count.

    Attributes:
        seeds, left_out: of its runs.
        curves: of those that count.
        where: its trained range.
        levels: level and drift of the runs there, [2, n, R + 1, D].
        bias: that the fit may give their mean level, [D].
        lines: how fast their losses fall.
        maturity: whether it is past its transition.
    """

    seeds: list[int]
    left_out: list[LeftOut]
    curves: list[Curve]
    where: Range
    levels: ndarray
    bias: ndarray
    lines: Lines
    maturity: Maturity

    def over(self, where: Range) -> tuple[ndarray, ndarray]:
        """Return level and drift of the runs over another range with the same upper end, and the bias of their mean."""
        if np.array_equal(where.low, self.where.low):  # as of each row that ends below the reference
            return self.levels, self.bias
        return levels_of(self.curves, where)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An architecture's runs that count and its trained range.

    Attributes:
        name, seeds, left_out: of its runs.
        curves: of those that count.
        where: its trained range.
        levels: of its runs and of the reference's over the range.
        drifts, nexts: the same of their drift, and of their level over the next range.
        bias: that the fit may give the gap, [D].
        classes: what classes of tokens contribute to levels; None where records lack them.
        copying: of its runs.
        overfit: held-out minus training loss of it and of the reference.
        rises: tokens after which its held-out loss rises.
    """

    name: str
    seeds: list[int]
    left_out: list[LeftOut]
    curves: list[Curve]
    where: Range
    levels: Levels
    drifts: Levels
    nexts: Levels
    bias: ndarray
    classes: ClassLevels | None
    copying: CopyingShares
    overfit: tuple[float, float] | None
    rises: float | None

    @property
    def lost(self) -> bool:
        """Whether too many draws have no trained range for an interval to be trusted."""
        return bool(np.isnan(self.where.width).mean() > LOST_DRAWS)


def levels_of(curves: Sequence[Curve], where: Range) -> tuple[ndarray, ndarray]:
    """Return level and drift of runs, [2, n, R + 1, D], and the bias that the fit may give their mean level, [D]."""
    levels = np.stack([gap.level(curve, where) for curve in curves], axis=1)
    return levels, np.mean([gap.bias(curve, where) for curve in curves], axis=0)


def ends(where: Range) -> tuple[float, float]:
    """Return the ends of a range in the sample itself, the lower one first."""
    return float(where.low[0]), float(where.high[0])
