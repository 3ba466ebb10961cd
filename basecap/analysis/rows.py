"""The rows of the table of verdicts, as results.json holds them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, TypeVar

#: Probability that intervals leave out something true: those of a table together, over all looks at the study.
LEVEL = 0.05

Verdict = Literal["keeps", "degrades", "undecided", "early", "maturity unknown", "behind", "none"]
Item = TypeVar("Item")
Key = TypeVar("Key")


def finite(value: float | None) -> float | None:
    """Return a number, None where it is not finite: JSON has no such number."""
    return None if value is None or not isfinite(value) else value


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return items by their key, in the order of the first of each.

    >>> grouped([1, 2, 3], lambda item: item % 2)
    {1: [1, 3], 0: [2]}
    """
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate and the ends of its interval, None where there is no interval."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Interval(Estimate):
    """An estimate that has an interval."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Direction:
    """Where a gap goes within the trained range, with intervals for its row alone.

    Attributes:
        now: the gap over the half of the range with the lower losses, which comes later.
        drift: how much larger it is there than over the other half, and its 90 % interval.
        next: the gap over another range as wide as this one if the drift goes on, and its 90 % interval.
        state: "settled" where the next range would not change the verdict, "drifts" where it would, "open" where it
            may; None where there is no verdict that it could change.
    """

    now: float
    drift: Interval
    next: Interval
    state: Literal["settled", "drifts", "open"] | None = None


@dataclass(frozen=True, kw_only=True)
class CopyingShares:
    """Share of the loss that models save by copying from their context, where the trained range begins and ends.

    Each is None where it was not measured.
    """

    begin: float | None
    end: float | None


@dataclass(frozen=True, kw_only=True)
class Maturity:
    """Whether the reference is past learning to copy from its context, without which no row gets a verdict.

    Attributes:
        state: "mature", or what every row says instead of a verdict.
        words: why, and what would help.
        copying: of the reference.
        started, passed: tokens after which its transition began and was past; None where that was not measured.
        more: about how many more tokens would help; None where that is not known.
        rises: tokens after which its held-out loss rises, where the trained range ends; None where it falls to the end.
    """

    state: Literal["mature", "early", "maturity unknown"]
    words: str
    copying: CopyingShares
    started: float | None = None
    passed: float | None = None
    more: float | None = None
    rises: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gap(Interval):
    """The gap on some domains, in nats per token.

    Attributes:
        value, low, high: with the interval that holds for all rows of the table together.
        single: the interval that holds for this row alone.
        error: standard error.
        bits_per_byte: the same in bits per byte.
        tokens: what it is worth: the share of the reference's tokens after which it would be as good; None where its
            loss does not fall.
        tolerance, tolerance_error: the largest gap that still counts as keeping the capability, and its standard error,
            None likewise.
        split: how far two groups of the reference's own runs differ, None when that is not measurable.
        direction: where it goes; None in a study without an unseen domain.
        verdict: what follows.
        alone: what would follow from `single`.
    """

    single: Interval
    error: float | None
    bits_per_byte: Interval
    tokens: Interval | None
    tolerance: float | None
    tolerance_error: float | None
    split: float | None
    direction: Direction | None = None
    verdict: Verdict
    alone: Verdict


@dataclass(frozen=True, kw_only=True)
class DomainGap(Gap):
    """The gap on one domain."""

    domain: str


@dataclass(frozen=True, kw_only=True)
class GapPart(Estimate):
    """What a class of tokens contributes to a gap; the parts of a gap add up to it.

    Attributes:
        name: of the class, see `basecap.records.token_classes`.
        value, low, high: in nats per token of all classes together. The 95 % interval holds for this part alone, over
            runs: other documents would change it too. None with fewer than two runs of either architecture.
        tokens: share of the tokens that are of this class.
        share: of the gap, negative where it has the other sign; None where the interval of the gap includes 0.
    """

    name: str
    tokens: float
    share: float | None


@dataclass(frozen=True, kw_only=True)
class GapCurve:
    """The gap along the whole range of losses that both have seen, each list [G]; ends are None without an interval.

    `tokens` are those after which the reference has these losses.
    """

    loss: list[float]
    tokens: list[float]
    value: list[float]
    low: list[float] | None
    high: list[float] | None


@dataclass(frozen=True, kw_only=True)
class More:
    """What would decide an undecided row: `runs` more of it and of the reference, `seconds` of training here."""

    runs: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A run that is not compared, and why."""

    seed: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """An architecture against the reference; what could not be computed is None or empty, and `words` say why.

    Attributes:
        name: of the architecture.
        verdict, words: what was found, and why.
        seeds, reference_seeds: the runs that were compared.
        left_out, reference_left_out: the runs that were not; of the reference, none where nothing was compared.
        conditional: whether the interval holds for these trained models only: no variance of runs could be estimated.
        gaps, reference_gaps: of each run in `seeds` and `reference_seeds`, on the mean over the unseen domains.
        range: of pre-training loss, from the lowest.
        gap: on the mean over the unseen domains.
        weighted: on their mean with weights by precision, the same in every row.
        domains: on each of them.
        parts: of `gap`, by class of tokens; empty where records lack classes.
        along: the whole curve.
        more: what would decide an undecided row; None when no number of runs would, or it is decided.
        copying: of the architecture's runs.
        overfit: how much higher held-out loss is than training loss, of the architecture and of the reference at equal
            training loss, the lowest that both have reached.
        rises: tokens after which its held-out loss rises, where its curves end; None where it falls to the end.
    """

    name: str
    verdict: Verdict
    words: str
    seeds: list[int]
    reference_seeds: list[int]
    left_out: list[LeftOut]
    reference_left_out: list[LeftOut] = field(default_factory=list)
    conditional: bool = False
    gaps: list[float] = field(default_factory=list)
    reference_gaps: list[float] = field(default_factory=list)
    range: tuple[float, float] | None = None
    gap: Gap | None = None
    weighted: Gap | None = None
    domains: tuple[DomainGap, ...] = ()
    parts: tuple[GapPart, ...] = ()
    along: GapCurve | None = None
    more: More | None = None
    copying: CopyingShares | None = None
    overfit: tuple[float, float] | None = None
    rises: float | None = None
