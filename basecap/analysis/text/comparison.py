"""The architectures of a study against its reference: what is measured of each, and the table of verdicts."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy import ndarray

from basecap.analysis.rows import LEVEL, DomainGap, Gap, Interval, LeftOut, More, Row, Verdict
from basecap.analysis.text import gap, reasons
from basecap.analysis.text.draws import Curve, Runs, draw, enough, few_clusters, fewest_units
from basecap.analysis.text.gap import FEWEST_POINTS, LOST_DRAWS, Range
from basecap.analysis.text.gap_curve import gap_curve
from basecap.analysis.text.intervals import TINY, Estimates, Levels, Table
from basecap.analysis.text.losses import RunLosses
from basecap.analysis.text.noise import DRAWS
from basecap.analysis.text.power import more_runs
from basecap.analysis.text.worth import Fall, Lines, judge

#: While no run of an architecture has finished, those count that have seen this share of the tokens of the furthest.
#: The mean final loss, which ends the trained range, would otherwise be that of runs in their middle.
LEAST_PROGRESS = 0.9
#: How far into the reference's own range a run that is behind should train.
ENTRY = 0.25


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
    """The reference's runs that count, its trained range, their levels there [n, R + 1, D], and how fast they fall."""

    seeds: list[int]
    left_out: list[LeftOut]
    curves: list[Curve]
    where: Range
    levels: ndarray
    lines: Lines

    def levels_over(self, where: Range) -> ndarray:
        """Return the levels of the runs over another range with the same upper end, [n, R + 1, D]."""
        if np.array_equal(where.low, self.where.low):  # as of each row that ends below the reference
            return self.levels
        return np.stack([gap.level(curve, where) for curve in self.curves])


@dataclass(frozen=True, kw_only=True)
class Unfit:
    """Why nothing can be compared with the reference; *behind* where more tokens would change that."""

    reason: str
    behind: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An architecture's runs that count, its trained range, and the levels of its runs and of the reference's there."""

    name: str
    seeds: list[int]
    left_out: list[LeftOut]
    curves: list[Curve]
    where: Range
    levels: Levels

    @property
    def lost(self) -> bool:
        """Whether too many draws have no trained range for an interval to be trusted."""
        return bool(np.isnan(self.where.width).mean() > LOST_DRAWS)


def compare_runs(names: Sequence[str], runs: Runs, setting: Setting, generator: np.random.Generator) -> list[Row]:
    """Compare each of the architectures `names` with the reference; returns a row for each."""
    example = next((run for (name, _), run in runs.items() if name == setting.reference), None)
    if example is None:
        return [_without(name, setting.open, _no_runs(setting.reference, setting), []) for name in names]
    comparable = {key: run for key, run in runs.items() if _comparable(run, example, setting)}
    curves = draw(comparable, setting.train, setting.ood, setting.resamples, generator)
    reference = _reference(runs, curves, setting)
    found = [_measure(name, runs, curves, reference, setting) for name in names]
    measured = [one for one in found if isinstance(one, Measured) and not one.lost]
    trusted = enough(example, setting.train, setting.tested)
    judge = None
    if measured and trusted and isinstance(reference, Reference):
        judge = _Judge(measured, reference, example, setting)
    rows = []
    for one in found:
        if isinstance(one, Row):
            rows.append(one)
        elif judge is None or one.lost:
            rows.append(_bare(one, reasons.LOST if trusted else reasons.FEW_DOCUMENTS, setting))
        else:
            rows.append(judge.row(measured.index(one)))
    few = few_clusters(example, (*setting.train, *setting.ood))
    return [reasons.with_cautions(row, few) for row in rows]


def _comparable(run: RunLosses, example: RunLosses, setting: Setting) -> bool:
    return run.same_documents(example) and (bool(setting.ood) or bool(np.isfinite(run.training).all()))


def _counting(
    name: str, runs: Runs, curves: Mapping[tuple[str, int], Curve], setting: Setting
) -> tuple[dict[int, Curve], dict[int, str]]:
    """Return the runs of an architecture that have trained to their end, by seed, and why others do not count.

    While none has finished, those count that are nearly as far as the furthest.
    """
    missing = reasons.OTHER_DOCUMENTS if setting.ood else reasons.NO_TRAINING_LOSS
    why = {seed: missing for who, seed in sorted(runs) if who == name and (who, seed) not in curves}
    own = {seed: curve for (who, seed), curve in sorted(curves.items()) if who == name}
    finished = {seed for seed in own if runs[name, seed].finished}
    furthest = max((curve.trained[-1] for curve in own.values()), default=0)
    counting = {}
    for seed, curve in own.items():
        if (not finished or seed in finished) and curve.trained[-1] >= LEAST_PROGRESS * furthest:
            counting[seed] = curve
        else:
            why[seed] = reasons.short(curve.trained[-1], furthest)
    return counting, why


def _reference(runs: Runs, curves: Mapping[tuple[str, int], Curve], setting: Setting) -> Reference | Unfit:
    """Return what the rows are measured against, or why nothing can be."""
    counting, why = _counting(setting.reference, runs, curves, setting)
    if not counting:
        return Unfit(reason=reasons.NO_TRAINING_LOSS)
    most = max(len(curve.trained) for curve in counting.values())
    if most < FEWEST_POINTS:
        return Unfit(reason=reasons.few_points(reasons.REFERENCE, most))
    middle = gap.middle(list(counting.values()), setting.share)
    own = {seed: curve for seed, curve in counting.items() if curve.x[0, -1] < middle}
    why |= {
        seed: reasons.diverged(setting.loss, float(curve.x[0, -1]), middle, setting.share)
        for seed, curve in counting.items()
        if seed not in own
    }
    every = list((own or counting).values())
    where = Range(low=gap.final(every), high=gap.upper_end(every, setting.share, setting.bigram))
    low, high = float(where.low[0]), float(where.high[0])
    if not (own and low < high):
        more = gap.more_tokens(every, high) if low >= high else None
        reason = reasons.untrained(setting.reference, low, setting.bigram, more)
        return Unfit(reason=reason, behind=more is not None)
    kept, few = _reaching(own, where, reasons.REFERENCE)
    if not kept:
        return Unfit(reason=next(iter(few.values())))
    return Reference(
        seeds=list(kept),
        left_out=_left_out(why | few),
        curves=list(kept.values()),
        where=where,
        levels=np.stack([gap.level(curve, where) for curve in kept.values()]),
        lines=Lines.of(list(kept.values()), setting.share),
    )


def _reaching(curves: Mapping[int, Curve], where: Range, who: str) -> tuple[dict[int, Curve], dict[int, str]]:
    """Return the runs with points enough near a range, by seed, and why others are not; first the best of those."""
    counts = {seed: gap.points_within(curve, where) for seed, curve in curves.items()}
    kept = {seed: curve for seed, curve in curves.items() if counts[seed] >= FEWEST_POINTS}
    few = sorted((seed for seed in curves if seed not in kept), key=lambda seed: -counts[seed])
    return kept, {seed: reasons.few_points(who, counts[seed]) for seed in few}


def _no_runs(name: str, setting: Setting) -> str:
    known = name if name == setting.reference else None
    return reasons.no_runs(known, setting.waiting, name in setting.failed)


def _left_out(why: Mapping[int, str]) -> list[LeftOut]:
    return [LeftOut(seed=seed, why=reason) for seed, reason in sorted(why.items())]


def _measure(
    name: str,
    runs: Runs,
    curves: Mapping[tuple[str, int], Curve],
    reference: Reference | Unfit,
    setting: Setting,
) -> Measured | Row:
    """Return the levels of an architecture over its trained range, or the row that says why there are none."""
    seeds = sorted(seed for who, seed in runs if who == name)
    counting, why = _counting(name, runs, curves, setting)
    if not seeds:
        return _without(name, "none", _no_runs(name, setting), seeds)
    if not counting:
        return _without(name, setting.open, next(iter(why.values())), seeds)
    if isinstance(reference, Unfit):
        return _without(name, "behind" if reference.behind else setting.open, reference.reason, seeds)
    high = float(reference.where.high[0])
    reaching = {seed: curve for seed, curve in counting.items() if curve.x[0, -1] < high}
    if not reaching:
        best = float(min(curve.x[0, -1] for curve in counting.values()))
        more = gap.more_tokens(list(counting.values()), high - ENTRY * (high - float(reference.where.low[0])))
        return _without(name, "behind", reasons.behind(setting.loss, best, high, more), seeds)
    why |= {
        seed: reasons.outside(setting.loss, float(curve.x[0, -1]), high)
        for seed, curve in counting.items()
        if seed not in reaching
    }
    where = Range(low=np.maximum(gap.final(list(reaching.values())), reference.where.low), high=reference.where.high)
    kept, few = _reaching(reaching, where, "it")
    if not kept:
        return _without(name, setting.open, next(iter(few.values())), seeds)
    own = list(kept.values())
    return Measured(
        name=name,
        seeds=list(kept),
        left_out=_left_out(why | few),
        curves=own,
        where=where,
        levels=Levels(
            own=np.stack([gap.level(curve, where) for curve in own]),
            reference=reference.levels_over(where),
            scatter=lambda: (_scatter(own, where), _scatter(reference.curves, where)),
        ),
    )


def _scatter(curves: Sequence[Curve], where: Range) -> tuple[ndarray, float]:
    """Return the covariance [D, D] that the scatter of points gives the mean level of runs, and its freedom."""
    parts = [gap.scatter(curve, where) for curve in curves]
    return np.sum([part for part, _ in parts], axis=0) / len(parts) ** 2, sum(freedom for _, freedom in parts)


def _without(name: str, verdict: Verdict, reason: str, seeds: list[int]) -> Row:
    left_out = [LeftOut(seed=seed, why=reason) for seed in seeds]
    return Row(name=name, verdict=verdict, words=reason, seeds=[], reference_seeds=[], left_out=left_out)


def _bare(one: Measured, reason: str, setting: Setting) -> Row:
    """Return a row with a range and no number: nothing of it could be trusted."""
    row = _without(one.name, setting.open, reason, [])
    return replace(row, seeds=one.seeds, left_out=one.left_out, range=_ends(one.where))


def _ends(where: Range) -> tuple[float, float]:
    return float(where.low[0]), float(where.high[0])


class _Judge:
    """Turns the measured levels of a whole table into its rows."""

    def __init__(self, measured: Sequence[Measured], reference: Reference, example: RunLosses, setting: Setting):
        self.measured = measured
        self.reference = reference
        self.setting = setting
        levels = [one.levels for one in measured]
        documents = fewest_units(example, (*setting.train, *setting.ood)) - 1
        table = Table(levels, reference.levels, documents=documents, level=setting.level, draws=setting.draws)
        tested = [example.domains[domain] for domain in setting.tested]
        self.bits = np.array([part.tokens.sum() / part.bytes.sum() / math.log(2) for part in tested])
        size = np.array([part.tokens.sum() for part in tested], dtype=float)
        plain = np.full(len(tested), 1 / len(tested)) if setting.ood else size / size.sum()
        self.weights = {"plain": plain, "weighted": table.precisions(len(tested))}
        self.weights |= dict(zip(setting.tested, np.eye(len(tested)), strict=True))
        bits = {key: self.weights[key] * self.bits for key in ("plain", "weighted")}
        found = [table.estimate(weights) for weights in (*self.weights.values(), *bits.values())]
        self.estimates = dict(zip(self.weights, found, strict=False))
        self.in_bits = dict(zip(bits, found[len(self.weights) :], strict=True))

    def row(self, index: int) -> Row:
        """Return the row of one architecture."""
        one, estimates = self.measured[index], self.estimates["plain"]
        found = self._gap("plain", index)
        conditional = estimates.shared is None
        reach = float(estimates.half.single[index] / np.sqrt(max(estimates.errors.variance[index], TINY)))
        own, base = (levels[:, 0] @ self.weights["plain"] for levels in (one.levels.own, one.levels.reference))
        countable = found.verdict == "undecided" and found.tolerance is not None and not conditional
        row = Row(
            name=one.name,
            verdict=found.verdict,
            words="",
            seeds=one.seeds,
            reference_seeds=self.reference.seeds,
            left_out=one.left_out,
            reference_left_out=self.reference.left_out,
            conditional=conditional,
            gaps=(own - base.mean()).tolist(),
            reference_gaps=(base - base.mean()).tolist(),
            range=_ends(one.where),
            gap=found,
            weighted=self._gap("weighted", index),
            domains=tuple(DomainGap(domain=domain, **vars(self._gap(domain, index))) for domain in self.setting.tested),
            along=gap_curve(one.curves, self.reference.curves, self.weights["plain"], estimates.shared, reach),
            more=self._more(index, found) if countable else None,
        )
        return replace(row, words=reasons.of(row))

    def _gap(self, key: str, index: int) -> Gap:
        estimates, setting = self.estimates[key], self.setting
        joint = _interval(estimates, index, estimates.half.joint)
        single = _interval(estimates, index, estimates.half.single)
        variance = float(estimates.errors.variance[index])
        fall = self._fall(key, index)
        tokens, alone = (fall.worth(found, variance) if fall.measured else None for found in (joint, single))
        tolerance = fall.tolerance(setting.cost) if fall.measured else None
        return Gap(
            **vars(joint),
            single=single,
            error=math.sqrt(variance),
            bits_per_byte=self._bits(key, index),
            tokens=tokens,
            tolerance=tolerance,
            tolerance_error=fall.tolerance_error(setting.cost) if fall.measured else None,
            split=estimates.split,
            verdict=judge(joint, tokens, tolerance, setting.cost, estimates.split) if setting.ood else "none",
            alone=judge(single, alone, tolerance, setting.cost, estimates.split) if setting.ood else "none",
        )

    def _fall(self, key: str, index: int) -> Fall:
        weights = self.weights[key]
        return self.reference.lines.fall(weights, self.measured[index].levels.reference[:, 0] @ weights)

    def _bits(self, key: str, index: int) -> Interval:
        """Return the interval in bits per byte, of a single domain the same times a number."""
        if key in self.in_bits:
            return _interval(self.in_bits[key], index, self.in_bits[key].half.joint)
        found = _interval(self.estimates[key], index, self.estimates[key].half.joint)
        bits = float(self.weights[key] @ self.bits)
        return Interval(value=bits * found.value, low=bits * found.low, high=bits * found.high)

    def _more(self, index: int, found: Gap) -> More | None:
        one, estimates = self.measured[index], self.estimates["plain"]
        assert found.tolerance is not None
        variance = float(estimates.errors.variance[index])
        margin = self._fall("plain", index).margin(self.setting.cost, found.high - found.value, variance)
        needed = replace(found, tolerance=found.tolerance - margin)
        count = more_runs(estimates, index, (len(one.seeds), len(self.reference.seeds)), needed, self.setting.level)
        if count is None:
            return None
        times = [self.setting.seconds.get(name) for name in (one.name, self.setting.reference)]
        known = [time for time in times if time is not None]
        return More(runs=count, seconds=count * sum(known) if len(known) == len(times) else None)


def _interval(estimates: Estimates, index: int, half: ndarray) -> Interval:
    value, reach = float(estimates.value[index]), float(half[index])
    return Interval(value=value, low=value - reach, high=value + reach)
