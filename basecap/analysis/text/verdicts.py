"""From the measured levels of all rows of a table to their gaps, intervals and verdicts."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy import ndarray

from basecap.analysis.rows import Direction, DomainGap, Gap, Interval, More, Row, Verdict
from basecap.analysis.text import reasons
from basecap.analysis.text.draws import fewest_units
from basecap.analysis.text.gap_curve import gap_curve
from basecap.analysis.text.intervals import TINY, Estimates, Table
from basecap.analysis.text.losses import RunLosses
from basecap.analysis.text.maturity import (
    DIRECTION_DRAWS,
    DIRECTION_LEVEL,
    directions,
    runs_to_settle,
    verdict_of,
    with_state,
)
from basecap.analysis.text.measured import Measured, Reference, Setting, ends
from basecap.analysis.text.power import more_runs
from basecap.analysis.text.token_classes import gap_parts
from basecap.analysis.text.worth import Fall, judge


class Judge:
    """Turns the measured levels of a whole table into its rows."""

    def __init__(self, measured: Sequence[Measured], reference: Reference, example: RunLosses, setting: Setting):
        self.measured = measured
        self.reference = reference
        self.setting = setting
        documents = fewest_units(example, (*setting.train, *setting.ood)) - 1
        level, drift = reference.levels
        table = Table(
            [one.levels for one in measured], level, documents=documents, level=setting.level, draws=setting.draws
        )
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
        drifts, nexts = (
            Table(
                rows,
                theirs,
                documents=documents,
                level=DIRECTION_LEVEL,
                draws=min(setting.draws, DIRECTION_DRAWS),
            )
            for rows, theirs in (
                ([one.drifts for one in measured], drift),
                ([one.nexts for one in measured], level + 2 * drift),
            )
        )
        self.directions = {
            key: directions(drifts.estimate(weights), self.estimates[key], nexts.estimate(weights))
            for key, weights in self.weights.items()
        }

    def row(self, index: int) -> Row:
        """Return the row of one architecture."""
        one, estimates = self.measured[index], self.estimates["plain"]
        found = self._gap("plain", index)
        conditional = estimates.shared is None
        reach = float(estimates.half.single[index] / np.sqrt(max(estimates.errors.variance[index], TINY)))
        own, base = (levels[:, 0] @ self.weights["plain"] for levels in (one.levels.own, one.levels.reference))
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
            range=ends(one.where),
            gap=found,
            weighted=self._gap("weighted", index),
            domains=tuple(DomainGap(domain=domain, **vars(self._gap(domain, index))) for domain in self.setting.tested),
            parts=() if one.classes is None else gap_parts(one.classes, self.weights["plain"], found),
            copying=one.copying,
            overfit=one.overfit,
            rises=one.rises,
            along=gap_curve(one.curves, self.reference.curves, self.weights["plain"], estimates.shared, reach),
            more=self._more(index, found),
        )
        return replace(row, words=reasons.of(row, self.reference.maturity))

    def _gap(self, key: str, index: int) -> Gap:
        estimates, setting = self.estimates[key], self.setting
        # What the fit may be off by is no error of sampling: it moves both ends.
        bias = self._bias(index, self.weights[key])
        joint = _interval(estimates, index, estimates.half.joint + bias)
        single = _interval(estimates, index, estimates.half.single + bias)
        variance = float(estimates.errors.variance[index])
        fall = self._fall(key, index)
        tokens, alone = (fall.worth(found, variance) if fall.measured else None for found in (joint, single))
        tolerance = fall.tolerance(setting.cost) if fall.measured else None
        words = [judge(*pair, tolerance, setting.cost, estimates.split) for pair in ((joint, tokens), (single, alone))]
        direction = self.directions[key][index]
        mature = self.reference.maturity.state == "mature"
        followed = [with_state(direction, word, tolerance) if mature else direction for word in words]
        verdicts = [self._verdict(*pair) for pair in zip(words, followed, strict=True)]
        return Gap(
            **vars(joint),
            single=single,
            error=math.sqrt(variance),
            bits_per_byte=self._bits(key, index),
            tokens=tokens,
            tolerance=tolerance,
            tolerance_error=fall.tolerance_error(setting.cost) if fall.measured else None,
            split=estimates.split,
            direction=followed[0] if setting.ood else None,
            verdict=verdicts[0],
            alone=verdicts[1],
        )

    def _verdict(self, word: Verdict, direction: Direction) -> Verdict:
        """Return what is said where an interval alone says `word`."""
        if not self.setting.ood:
            return "none"
        state = self.reference.maturity.state
        return verdict_of(word, direction) if state == "mature" else state

    def _bias(self, index: int, weights: ndarray) -> float:
        """Return about how far the fit may be off in the gap of a row, in the mean over domains with `weights` [D]."""
        return abs(float(self.measured[index].bias @ weights))

    def _fall(self, key: str, index: int) -> Fall:
        weights = self.weights[key]
        return self.reference.lines.fall(weights, self.measured[index].levels.reference[:, 0] @ weights)

    def _bits(self, key: str, index: int) -> Interval:
        """Return the interval in bits per byte, of a single domain the same times a number."""
        weights = self.weights[key]
        if key in self.in_bits:
            bias = self._bias(index, weights * self.bits)
            return _interval(self.in_bits[key], index, self.in_bits[key].half.joint + bias)
        found = _interval(self.estimates[key], index, self.estimates[key].half.joint + self._bias(index, weights))
        bits = float(weights @ self.bits)
        return Interval(value=bits * found.value, low=bits * found.low, high=bits * found.high)

    def _more(self, index: int, found: Gap) -> More | None:
        """Return how many more runs would decide an undecided row, or tell where its gap goes."""
        one, estimates = self.measured[index], self.estimates["plain"]
        if found.verdict != "undecided" or found.tolerance is None or estimates.shared is None:
            return None
        counts = len(one.seeds), len(self.reference.seeds)
        may_move = found.direction is not None and found.direction.state == "open"
        count = runs_to_settle(found, min(counts)) if may_move else self._runs_to_decide(index, found, counts)
        if count is None:
            return None
        times = [self.setting.seconds.get(name) for name in (one.name, self.setting.reference)]
        known = [time for time in times if time is not None]
        return More(runs=count, seconds=count * sum(known) if len(known) == len(times) else None)

    def _runs_to_decide(self, index: int, found: Gap, counts: tuple[int, int]) -> int | None:
        estimates = self.estimates["plain"]
        assert found.tolerance is not None
        variance = float(estimates.errors.variance[index])
        margin = self._fall("plain", index).margin(self.setting.cost, found.high - found.value, variance)
        needed = replace(found, tolerance=found.tolerance - margin)
        several = sum(len(one.seeds) > 1 for place, one in enumerate(self.measured) if place != index)
        return more_runs(estimates, index, counts, several, needed, self.setting.level)


def _interval(estimates: Estimates, index: int, half: ndarray) -> Interval:
    value, reach = float(estimates.value[index]), float(half[index])
    return Interval(value=value, low=value - reach, high=value + reach)
