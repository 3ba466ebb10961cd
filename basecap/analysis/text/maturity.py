"""Whether a comparison comes too early: has the reference learned to copy from its context, does a gap stand still?

Within a short part of its training a language model learns to copy from its context, and its loss on unseen domains
falls by more than a nat. Models that are compared within that transition differ by when they learn it: a gap says
nothing of what they keep. So a verdict needs a reference that was past its transition where the trained range begins,
and a gap whose drift over that range would not turn the verdict into another one.

The share of copying is that of the evaluation `copying`. In runs of 30M parameters it rose from 2 % after 30M tokens to
27 % after 75M and to 35 % in the end (results/intervals); its numbers are the constants below.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from basecap.analysis.rows import CopyingShares, Direction, Gap, Interval, Maturity, Verdict
from basecap.analysis.text import reasons
from basecap.analysis.text.intervals import TINY, Estimates
from basecap.analysis.text.losses import RunLosses
from basecap.analysis.text.power import MOST_RUNS

#: Share of copying from which on a reference has started to copy, and below which it is not past its transition.
STARTED, PAST = 0.02, 0.1
#: It is past its transition where it copies this part of what it copies at the end of the trained range.
SETTLED = 0.75
#: From where it begins to copy until it is past its transition a reference takes this many times its tokens.
LATER = 2.4
#: A reference that had just started to copy when its learning rate had decayed is past its transition where the trained
#: range begins in a run of this many times the tokens, as its rate has not decayed there.
AFTER_DECAY = 2.5
#: A point beside which copying was measured lies within this factor of its tokens.
NEAR = 2.0
#: Probability that the interval of a drift, or of the gap over the next range, leaves out what is true: half at each
#: end.
DIRECTION_LEVEL = 0.1
#: Draws of errors behind them: others would move their ends by 1 % of a half-width.
DIRECTION_DRAWS = 10_000


def share_after(run: RunLosses, tokens: float) -> float:
    """Return the share of copying of a run after so many tokens, NaN where no point near it was measured."""
    known = np.isfinite(run.copying) if run.copying is not None else np.zeros(len(run.trained), bool)
    at = run.trained[known]
    if run.copying is None or not measured_near(at, tokens):
        return math.nan
    return float(np.interp(math.log(tokens), np.log(at), run.copying[known]))


def measured_near(at: np.ndarray, tokens: float) -> bool:
    """Whether copying that was measured at points, ascending, is known after so many tokens.

    >>> [measured_near(np.array([40, 100]), tokens) for tokens in (30, 50, 100, 110)]
    [False, True, True, False]
    """
    before, after = at[at <= tokens], at[at >= tokens]
    return bool(len(before) and len(after) and tokens <= NEAR * before[-1] and after[0] <= NEAR * tokens)


def copying_of(runs: Sequence[RunLosses], begin: float, end: float | None) -> CopyingShares:
    """Return the mean share of copying of runs after `begin` and `end` tokens, None: their last.

    Where both were measured of some runs, those alone count.
    """
    found = np.array([[share_after(run, begin), share_after(run, end or run.trained[-1])] for run in runs])
    both = found[np.isfinite(found).all(1)]
    first, last = (_mean(column) for column in (both if len(both) else found).T)
    return CopyingShares(begin=first, end=last)


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def maturity_of(runs: Sequence[RunLosses], share: float, end: float, rises: float | None) -> Maturity:
    """Return whether the reference is mature.

    Args:
        runs: of the reference.
        share: of its tokens after which the trained range begins.
        end: tokens at its end.
        rises: tokens after which its held-out loss rises, None where it falls to the end.
    """
    copying = copying_of(runs, share * end, end)
    if copying.end is None:
        return Maturity(state="maturity unknown", words=reasons.NO_COPYING, copying=copying, rises=rises)
    if copying.end < STARTED:
        words = reasons.no_transition(copying.end, end)
        return Maturity(state="maturity unknown", words=words, copying=copying, rises=rises)
    started, passed = (_reached(runs, level, end) for level in (STARTED, SETTLED * copying.end))
    mature = copying.end >= PAST and copying.begin is not None and copying.begin >= SETTLED * copying.end
    if copying.end >= PAST and copying.begin is None:
        words = reasons.no_copying_at(share * end)
        return Maturity(state="maturity unknown", words=words, copying=copying, started=started, rises=rises)
    if mature and (late := sum(share_after(run, end) < PAST for run in runs)):  # false for NaN
        words = reasons.late_runs(late, len(runs), PAST)
        return Maturity(state="early", words=words, copying=copying, started=started, rises=rises)
    if mature:
        words = reasons.mature(copying)
        return Maturity(state="mature", words=words, copying=copying, started=started, passed=passed, rises=rises)
    more = _more_tokens(started, passed if copying.end >= PAST else None, share, end)
    words = reasons.immature(copying, PAST, more)
    return Maturity(state="early", words=words, copying=copying, started=started, more=more, rises=rises)


def _reached(runs: Sequence[RunLosses], level: float, end: float) -> float | None:
    """Return the tokens after which runs copy a share `level`, by the logarithm, a mean; None where not measured."""
    found = []
    for run in runs:
        if run.copying is None:
            continue
        known = np.isfinite(run.copying) & (run.trained <= end)
        shares, places = run.copying[known], np.log(run.trained[known])
        first = int(np.argmax(shares >= level)) if (shares >= level).any() else 0
        if first:  # it was measured before, too
            found.append(float(np.interp(level, shares[first - 1 : first + 1], places[first - 1 : first + 1])))
    return math.exp(np.mean(found)) if found else None


def _more_tokens(started: float | None, passed: float | None, share: float, end: float) -> float | None:
    """Return about how many more tokens it takes for the reference to be past its transition where its range begins."""
    needed = [part / share for part in (passed, None if started is None else LATER * started) if part is not None]
    more = max([*needed, *([] if started else [AFTER_DECAY * end])]) - end
    return more if more > 0 else None


def directions(drift: Estimates, level: Estimates, after: Estimates) -> list[Direction]:
    """Return where the gap of each row goes, from its drift, its level and its level over the next range."""
    now = (level.value + drift.value / 2).tolist()
    found = zip(now, _intervals(drift), _intervals(after), strict=True)
    return [Direction(now=there, drift=moved, next=following) for there, moved, following in found]


def _intervals(found: Estimates) -> list[Interval]:
    """Return the interval of each row alone."""
    ends = zip(found.value.tolist(), found.half.single.tolist(), strict=True)
    return [Interval(value=value, low=value - half, high=value + half) for value, half in ends]


def with_state(direction: Direction, word: Verdict, tolerance: float | None) -> Direction:
    """Return where a gap goes with what that means for the verdict `word` that its interval gives."""
    if word not in ("keeps", "degrades") or tolerance is None:
        return direction
    following, drift = direction.next, direction.drift
    if word == "keeps":
        holds, moves, crosses = following.high < tolerance, drift.low > 0, following.value >= tolerance
    else:
        holds, moves, crosses = following.low > tolerance, drift.high < 0, following.value <= tolerance
    return replace(direction, state="settled" if holds else "drifts" if moves and crosses else "open")


def verdict_of(word: Verdict, direction: Direction) -> Verdict:
    """Return the verdict where the interval says `word` and the reference is mature."""
    return {"drifts": "early", "open": "undecided"}.get(direction.state or "", word)  # type: ignore[return-value]


def runs_to_settle(found: Gap, runs: int) -> int | None:
    """Return about how many more runs of a row and of the reference would tell where its gap goes; it has `runs` now.

    None where more than `MOST_RUNS` would be needed.
    """
    assert found.direction is not None and found.tolerance is not None
    following = found.direction.next
    distance = abs(found.tolerance - following.value)
    needed = runs * ((following.high - following.value) / max(distance, TINY)) ** 2
    return max(1, math.ceil(needed - 1e-9) - runs) if needed <= MOST_RUNS else None
