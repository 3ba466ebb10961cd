"""The results of a study with chosen gaps."""

import math
from dataclasses import replace
from typing import Any

from basecap.analysis.results import RunRow, TextResults
from basecap.analysis.rows import (
    CopyingShares,
    DomainGap,
    Gap,
    GapCurve,
    Interval,
    LeftOut,
    Maturity,
    More,
    Row,
    Verdict,
)

DOMAINS = ("arxiv", "github")
TOLERANCE = 0.1
MATURE = Maturity(
    state="mature",
    words="the reference is past its transition",
    copying=CopyingShares(begin=0.3, end=0.33),
    started=1e7,
    passed=2e7,
)


def gap(value: float, half: float, verdict: Verdict = "undecided", **changes: Any) -> Gap:
    """Return a gap with an interval of half-width `half`."""
    interval = Interval(value=value, low=value - half, high=value + half)
    share = Interval(value=math.exp(-value), low=math.exp(-value - half), high=math.exp(-value + half))
    whole = Gap(
        **vars(interval),
        single=interval,
        error=half / 2,
        bits_per_byte=interval,
        tokens=share,
        tolerance=TOLERANCE,
        tolerance_error=0.01,
        split=None,
        verdict=verdict,
        alone=verdict,
    )
    return replace(whole, **changes)


def row(name: str, value: float, half: float, verdict: Verdict = "undecided", *, wide: float | None = None) -> Row:
    """Return a row with gaps on two domains; the intervals of the second have half-width `wide`."""
    found, wider = gap(value, half, verdict), gap(value, wide or half, verdict)
    return Row(
        name=name,
        verdict=verdict,
        words=f"what is said of {name}",
        seeds=[0, 1],
        reference_seeds=[0, 1, 2],
        left_out=[],
        range=(3.2, 3.6),
        gap=found,
        weighted=found,
        domains=tuple(
            DomainGap(domain=domain, **vars(part)) for domain, part in zip(DOMAINS, (found, wider), strict=True)
        ),
        along=GapCurve(
            loss=[3.0, 3.4, 4.0], tokens=[6e7, 3e7, 1e7], value=[value] * 3, low=[wider.low] * 3, high=[wider.high] * 3
        ),
    )


def without_gap(name: str, verdict: Verdict, words: str) -> Row:
    """Return a row of which nothing could be measured."""
    return Row(
        name=name, verdict=verdict, words=words, seeds=[], reference_seeds=[], left_out=[LeftOut(seed=0, why=words)]
    )


def undecided(name: str, runs: int | None = None, **changes: Any) -> Row:
    """Return an undecided row which `runs` more runs would decide."""
    more = None if runs is None else More(runs=runs, seconds=60.0 * runs)
    return replace(row(name, 0.05, 0.1), more=more, **changes)


def study(*rows: Row, mixed: bool = False, skipped: tuple[str, ...] = (), **changes: Any) -> TextResults:
    """Return the results of a study with these rows."""
    names = ["base", *(row.name for row in rows), *skipped]
    found = TextResults(
        name="made-up",
        summary="",
        scale=None,
        names=names,
        reference="base",
        cost=0.1,
        share=0.5,
        confidence=0.95,
        level=0.05,
        looks=None,
        added=None,
        resamples=2000,
        train_domains=list(DOMAINS) if mixed else ["c4"],
        ood_domains=[] if mixed else list(DOMAINS),
        few_clusters=[],
        controls=[],
        comparisons=list(rows),
        maturity=None if mixed else MATURE,
        runs=[],
        points=[],
        curves=[],
        documents=[],
        evaluations=[],
        failures=[],
        overlap=[],
        text_note=None,
        failed_checks={},
        sweep=[],
        settings={"architectures": [{"name": name} for name in names]},
        environment={},
    )
    return replace(found, **changes)


def run_row(name: str, seed: int, **changes: Any) -> RunRow:
    """Return the row of a finished run."""
    found = RunRow(
        name=name,
        seed=seed,
        use=name,
        machines=[],
        status="finished",
        state_bytes=None,
        parameters=None,
        seconds=None,
        evaluating=None,
        tokens=10,
        tokens_per_s=None,
    )
    return replace(found, **changes)
