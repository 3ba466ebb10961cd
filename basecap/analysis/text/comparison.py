"""The architectures of a study against its reference: what is measured of each, and the table of verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from basecap.analysis.rows import LeftOut, Maturity, Row, Verdict
from basecap.analysis.text import gap, reasons
from basecap.analysis.text.draws import Curve, Runs, countable, draw, enough, few_clusters
from basecap.analysis.text.gap import FEWEST_POINTS, Range
from basecap.analysis.text.intervals import Levels
from basecap.analysis.text.losses import RunLosses
from basecap.analysis.text.maturity import copying_of, maturity_of
from basecap.analysis.text.measured import Measured, Reference, Setting, ends, levels_of
from basecap.analysis.text.rising import before_rises, overfitting
from basecap.analysis.text.token_classes import class_levels
from basecap.analysis.text.verdicts import Judge
from basecap.analysis.text.worth import Lines

#: While no run of an architecture has finished, those count that have seen this share of the tokens of the furthest.
#: The mean final loss, which ends the trained range, would otherwise be that of runs in their middle.
LEAST_PROGRESS = 0.9
#: How far into the reference's own range a run that is behind should train.
ENTRY = 0.25


@dataclass(frozen=True, kw_only=True)
class Unfit:
    """Why nothing can be compared with the reference; *behind* where more tokens would change that."""

    reason: str
    behind: bool = False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A row for each architecture; whether the reference is mature, None where nothing can be compared with it."""

    rows: list[Row]
    maturity: Maturity | None


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """The runs of a study, their curves as drawn, and where the held-out loss of architectures rises.

    `curves` end there, `whole` go on.
    """

    runs: Runs
    whole: Mapping[tuple[str, int], Curve]
    curves: Mapping[tuple[str, int], Curve]
    rises: Mapping[str, float]

    def both(self, name: str, seeds: Sequence[int]) -> list[tuple[RunLosses, Curve]]:
        """Return losses and whole curves of an architecture's runs."""
        return [(self.runs[name, seed], self.whole[name, seed]) for seed in seeds]

    def cut(self, name: str, seeds: Sequence[int]) -> list[tuple[RunLosses, Curve]]:
        """Return losses and curves of an architecture's runs, which end where its held-out loss rises."""
        return [(self.runs[name, seed], self.curves[name, seed]) for seed in seeds]


def compare_runs(names: Sequence[str], runs: Runs, setting: Setting, generator: np.random.Generator) -> Comparison:
    """Compare each of the architectures `names` with the reference, without tested domains of too few documents."""
    example = next((run for (name, _), run in runs.items() if name == setting.reference), None)
    if example is None:
        reason = _no_runs(setting.reference, setting)
        return Comparison(rows=[_without(name, setting.open, reason, []) for name in names], maturity=None)
    if tested := countable({name: len(example.domains[name].tokens) for name in setting.tested}):
        setting = replace(setting, ood=tested) if setting.ood else replace(setting, train=tested)
    alike = {key: run for key, run in runs.items() if run.same_documents(example)}
    comparable = {key: run for key, run in alike.items() if setting.ood or np.isfinite(run.training).all()}
    curves = draw(comparable, setting.train, setting.ood, setting.resamples, generator)
    kept, rises = before_rises(curves) if setting.ood else (curves, {})  # a training loss rises for other reasons
    drawn = _Drawn(runs=runs, whole=curves, curves=kept, rises=rises)
    reference = _reference(drawn, setting)
    found = [_measure(name, drawn, reference, setting) for name in names]
    measured = [one for one in found if isinstance(one, Measured) and not one.lost]
    trusted = enough(example, setting.train, setting.tested)
    judge = None
    if measured and trusted and isinstance(reference, Reference):
        judge = Judge(measured, reference, example, setting)
    rows = []
    for one in found:
        if isinstance(one, Row):
            rows.append(one)
        elif judge is None or one.lost:
            rows.append(_bare(one, reasons.LOST if trusted else reasons.FEW_DOCUMENTS, setting))
        else:
            rows.append(judge.row(measured.index(one)))
    maturity = reference.maturity if isinstance(reference, Reference) and setting.ood else None
    if maturity is not None and maturity.state == "early":
        rows = [reasons.too_early(row, maturity) for row in rows]
    few = few_clusters(example, (*setting.train, *setting.ood))
    return Comparison(rows=[reasons.with_cautions(row, few) for row in rows], maturity=maturity)


def _counting(name: str, drawn: _Drawn, setting: Setting) -> tuple[dict[int, Curve], dict[int, str]]:
    """Return the runs of an architecture that have trained to their end, by seed, and why others do not count.

    While none has finished, those count that are nearly as far as the furthest.
    """
    missing = reasons.OTHER_DOCUMENTS if setting.ood else reasons.NO_TRAINING_LOSS
    why = {seed: missing for who, seed in sorted(drawn.runs) if who == name and (who, seed) not in drawn.curves}
    own = {seed: curve for (who, seed), curve in sorted(drawn.curves.items()) if who == name}
    finished = {seed for seed in own if drawn.runs[name, seed].finished}
    furthest = max((curve.trained[-1] for curve in own.values()), default=0)
    counting = dict[int, Curve]()
    for seed, curve in own.items():
        twin = next((other for other in counting if drawn.runs[name, seed].same_losses(drawn.runs[name, other])), None)
        if twin is not None:
            why[seed] = reasons.twin(twin)
        elif (not finished or seed in finished) and curve.trained[-1] >= LEAST_PROGRESS * furthest:
            counting[seed] = curve
        else:
            why[seed] = reasons.short(curve.trained[-1], furthest)
    return counting, why


def _reference(drawn: _Drawn, setting: Setting) -> Reference | Unfit:
    """Return what the rows are measured against, or why nothing can be."""
    counting, why = _counting(setting.reference, drawn, setting)
    if not counting:
        return Unfit(reason=reasons.NO_TRAINING_LOSS)
    most = max(len(curve.trained) for curve in counting.values())
    rises = drawn.rises.get(setting.reference)
    if most < FEWEST_POINTS:
        return Unfit(reason=reasons.few_points(reasons.REFERENCE, most, rises))
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
    kept, few = _reaching(own, where, reasons.REFERENCE, rises, entered=False)
    if not kept:
        return Unfit(reason=next(iter(few.values())))
    levels, bias = levels_of(list(kept.values()), where)
    losses = [drawn.runs[setting.reference, seed] for seed in kept]
    last = float(max(curve.trained[-1] for curve in kept.values()))
    return Reference(
        seeds=list(kept),
        left_out=_left_out(why | few),
        curves=list(kept.values()),
        where=where,
        levels=levels,
        bias=bias,
        lines=Lines.of(list(kept.values()), setting.share),
        maturity=maturity_of(losses, setting.share, last, rises),
    )


def _reaching(
    curves: Mapping[int, Curve], where: Range, who: str, rises: float | None, *, entered: bool
) -> tuple[dict[int, Curve], dict[int, str]]:
    """Return the runs with points enough near a range, by seed, and why others are not; first the best of those."""
    counts = {seed: gap.points_within(curve, where) for seed, curve in curves.items()}
    kept = {seed: curve for seed, curve in curves.items() if counts[seed] >= FEWEST_POINTS}
    few = sorted((seed for seed in curves if seed not in kept), key=lambda seed: -counts[seed])
    return kept, {seed: reasons.few_points(who, counts[seed], rises, entered=entered) for seed in few}


def _no_runs(name: str, setting: Setting) -> str:
    known = name if name == setting.reference else None
    return reasons.no_runs(known, setting.waiting, name in setting.failed)


def _left_out(why: Mapping[int, str]) -> list[LeftOut]:
    return [LeftOut(seed=seed, why=reason) for seed, reason in sorted(why.items())]


def _measure(name: str, drawn: _Drawn, reference: Reference | Unfit, setting: Setting) -> Measured | Row:
    """Return the levels of an architecture over its trained range, or the row that says why there are none."""
    seeds = sorted(seed for who, seed in drawn.runs if who == name)
    counting, why = _counting(name, drawn, setting)
    if not seeds:
        return _without(name, "none", _no_runs(name, setting), seeds)
    if not counting:
        return _without(name, setting.open, next(iter(why.values())), seeds)
    if isinstance(reference, Unfit):
        return _without(name, "behind" if reference.behind else setting.open, reference.reason, seeds)
    high, rises = float(reference.where.high[0]), drawn.rises.get(name)
    reaching = {seed: curve for seed, curve in counting.items() if curve.x[0, -1] < high}
    if not reaching:
        best = float(min(curve.x[0, -1] for curve in counting.values()))
        more = gap.more_tokens(list(counting.values()), high - ENTRY * (high - float(reference.where.low[0])))
        return _without(name, "behind", reasons.behind(setting.loss, best, high, more, rises), seeds)
    why |= {
        seed: reasons.outside(setting.loss, float(curve.x[0, -1]), high)
        for seed, curve in counting.items()
        if seed not in reaching
    }
    where = Range(low=np.maximum(gap.final(list(reaching.values())), reference.where.low), high=reference.where.high)
    entered = bool(where.low[0] > reference.where.low[0])
    kept, few = _reaching(reaching, where, "it", rises, entered=entered)
    if not kept:
        return _without(name, setting.open, next(iter(few.values())), seeds)
    own = list(kept.values())
    (level, drift), bias = levels_of(own, where)
    (base, moved), base_bias = reference.over(where)
    last = float(max(curve.trained[-1] for curve in own))
    theirs = drawn.both(setting.reference, reference.seeds)
    overfit = overfitting(drawn.both(name, list(kept)), theirs) if setting.ood else None
    return Measured(
        name=name,
        seeds=list(kept),
        left_out=_left_out(why | few),
        curves=own,
        where=where,
        levels=_levels(level, base, own, reference, where, gap.MEAN),
        drifts=_levels(drift, moved, own, reference, where, gap.DRIFT),
        nexts=_levels(level + 2 * drift, base + 2 * moved, own, reference, where, gap.NEXT),
        bias=bias - base_bias,
        classes=class_levels(
            drawn.cut(name, list(kept)), drawn.cut(setting.reference, reference.seeds), where, setting.tested
        ),
        copying=copying_of([drawn.runs[name, seed] for seed in kept], setting.share * last, last),
        overfit=overfit,
        rises=rises,
    )


def _levels(
    own: ndarray, theirs: ndarray, curves: Sequence[Curve], reference: Reference, where: Range, places: ndarray
) -> Levels:
    """Return one kind of levels of a row's runs and of the reference's, `places @` their curves, with its scatter."""
    return Levels(
        own=own,
        reference=theirs,
        scatter=lambda: (_scatter(curves, where, places), _scatter(reference.curves, where, places)),
    )


def _scatter(curves: Sequence[Curve], where: Range, places: ndarray) -> tuple[ndarray, float]:
    """Return the covariance [D, D] that the scatter of points gives the mean level of runs, and its freedom."""
    parts = [gap.scatter(curve, where, places) for curve in curves]
    return np.sum([part for part, _ in parts], axis=0) / len(parts) ** 2, sum(freedom for _, freedom in parts)


def _without(name: str, verdict: Verdict, reason: str, seeds: list[int]) -> Row:
    left_out = [LeftOut(seed=seed, why=reason) for seed in seeds]
    return Row(name=name, verdict=verdict, words=reason, seeds=[], reference_seeds=[], left_out=left_out)


def _bare(one: Measured, reason: str, setting: Setting) -> Row:
    """Return a row with a range and no number: nothing of it could be trusted."""
    row = _without(one.name, setting.open, reason, [])
    return replace(row, seeds=one.seeds, left_out=one.left_out, range=ends(one.where))
