"""How often rows are wrongly called early or settled: `python -m tests.analysis.text.simulate_maturity --json FILE`.

Two rules are simulated apart. Drift: studies whose gaps stand still, move away from the tolerance, or would cross it
over the next range; and how many 90 % intervals of a drift, and of the gap over the next range, hold. Transition:
references that learn to copy long before the trained range begins, or within it.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from basecap.analysis.text.comparison import compare_runs
from basecap.analysis.text.losses import RunLosses
from basecap.analysis.text.maturity import maturity_of
from tests.analysis.text.made_up import World, fall, runs, setting

POINTS = 20
#: A gap that costs a tenth of the reference's tokens, in nats.
TOLERANCE = float(fall(POINTS) * np.log(0.9))


@dataclass(frozen=True)
class Kind:
    """A row of a simulated study: its gap in the middle of the range, and its drift over the range.

    `settled` says whether the true gap over the next range is on the same side of the tolerance.
    """

    name: str
    gap: float
    drift: float

    @property
    def settled(self) -> bool:
        """Whether the next range changes nothing."""
        return (self.gap > TOLERANCE) == (self.gap + self.drift > TOLERANCE)


def kinds(size: float) -> list[Kind]:
    """Return rows whose gaps are `size` nats: large against the noise, or no verdict could be wrong."""
    return [
        Kind("better, stands still", -size, 0.0),
        Kind("better, moves away", -size, -size),
        Kind("worse, stands still", size, 0.0),
        Kind("worse, moves away", size, size),
        Kind("better, next just above the tolerance", -size, size + 1.1 * TOLERANCE),
        Kind("better, next as much worse", -size, 2 * size),
        Kind("worse, next just below the tolerance", size, -size + 0.9 * TOLERANCE),
        Kind("worse, next as much better", size, -2 * size),
    ]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How runs of a study differ.

    Attributes:
        runs: of a row and of the reference.
        level: standard deviation of the loss of a run, and that of a run of the reference.
        wander: the same of what fades along a run.
        spread: degrees of freedom by which the variances of architectures differ, 0 where all rows are equal.
    """

    runs: tuple[int, int]
    level: tuple[float, float]
    wander: tuple[float, float]
    spread: float = 0.0

    def draw(self, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw deviations of levels and of what fades, [rows + 1] each, the reference's first."""
        factor = np.sqrt(self.spread / rng.chisquare(self.spread, rows + 1)) if self.spread else np.ones(rows + 1)
        own, reference = np.array([self.level, self.wander]).T
        level, wander = np.column_stack([reference, *[own] * rows]) * factor
        return level, wander


#: Name, size of the gaps, noise.
NOISES: Sequence[tuple[str, float, Noise]] = [
    ("noise 0.05, wander 0.02; 3 runs, reference 8", 0.2, Noise(runs=(3, 8), level=(0.05, 0.05), wander=(0.02, 0.02))),
    ("noise 0.05, wander 0.05; 3 runs, reference 8", 0.2, Noise(runs=(3, 8), level=(0.05, 0.05), wander=(0.05, 0.05))),
    ("noise 0.10, wander 0.05; 3 runs, reference 8", 0.4, Noise(runs=(3, 8), level=(0.1, 0.1), wander=(0.05, 0.05))),
    (
        "noise 0.05, reference 0.15, wander 0.05; 3 runs, reference 8",
        0.4,
        Noise(runs=(3, 8), level=(0.05, 0.15), wander=(0.05, 0.05)),
    ),
    ("noise 0.10, wander 0.10; 6 runs, reference 12", 0.4, Noise(runs=(6, 12), level=(0.1, 0.1), wander=(0.1, 0.1))),
    ("noise 0.30, wander 0.10; 6 runs, reference 12", 0.8, Noise(runs=(6, 12), level=(0.3, 0.3), wander=(0.1, 0.1))),
    ("noise 0.05, wander 0.05; 2 runs, reference 2", 0.4, Noise(runs=(2, 2), level=(0.05, 0.05), wander=(0.05, 0.05))),
    ("noise 0.05, wander 0.02; 1 run, reference 5", 0.4, Noise(runs=(1, 5), level=(0.05, 0.05), wander=(0.02, 0.02))),
    (
        "noise 0.05, wander 0.02; 1 run, reference 2: these models only",
        0.2,
        Noise(runs=(1, 2), level=(0.05, 0.05), wander=(0.02, 0.02)),
    ),
    # As measured: variances differ as those of four degrees of freedom do, drifts of runs by 0.02 to 0.03 nats.
    *(
        (
            f"as measured; {own} runs, reference {reference}",
            0.4,
            Noise(runs=(own, reference), level=(0.05, 0.05), wander=(0.03, 0.03), spread=4),
        )
        for reference in (4, 8)
        for own in (1, 2, 3, 8)
    ),
]


@dataclass
class Found:
    """What became of the rows of one kind: how many got each verdict, how many 90 % intervals held the truth."""

    verdicts: Counter[str] = field(default_factory=Counter)
    drift_holds: int = 0
    next_holds: int = 0


def drifting(size: float, noise: Noise, *, studies: int, seed: int) -> dict[str, Found]:
    """Return what became of each kind of row, by the kind's name."""
    rows = kinds(size)
    world = World(
        gaps=tuple(kind.gap for kind in rows),
        drifts=tuple(kind.drift for kind in rows),
        seeds=noise.runs[0],
        reference_seeds=noise.runs[1],
        documents=40,
        points=POINTS,
        speeds=(1.0,),
    )
    rng, found = np.random.default_rng(seed), {kind.name: Found() for kind in rows}
    for _ in range(studies):
        level, wander = noise.draw(len(rows), rng)
        every = runs(replace(world, noise=tuple(level), wander=tuple(wander)), rng)
        compared = compare_runs(world.names, every, setting(60, 2000), np.random.default_rng(0))
        for kind, row in zip(rows, compared.rows, strict=True):
            own, direction = found[kind.name], row.gap.direction
            own.verdicts[row.verdict] += 1
            # From half to half of the range a gap moves half as far as from its beginning to its end.
            own.drift_holds += direction.drift.low <= kind.drift / 2 <= direction.drift.high
            own.next_holds += direction.next.low <= kind.gap + kind.drift <= direction.next.high
    return found


@dataclass(frozen=True)
class Learning:
    """How runs of a reference learn to copy: a logistic curve over the logarithm of tokens.

    Attributes:
        middle: share of its tokens after which a run copies half of what it will.
        steepness: of the curve; 4 as measured.
        plateau: what it will copy.
        spread: standard deviation of the logarithm of `middle` over runs; and of the plateau, relative to it, a third.
        error: standard deviation of a point.
        runs: of the reference.
    """

    middle: float
    steepness: float = 4.0
    plateau: float = 0.35
    spread: float = 0.15
    error: float = 0.005
    runs: int = 8

    def curve(self, at: np.ndarray, middle: float, plateau: float) -> np.ndarray:
        """Return the share of copying at parts of the tokens."""
        return plateau / (1 + (at / middle) ** -self.steepness)

    @property
    def ratio(self) -> float:
        """What an average run copies at half of its tokens, as a part of what it copies at the end."""
        half, end = self.curve(np.array([0.5, 1.0]), self.middle, self.plateau)
        return float(half / end)

    def draw(self, rng: np.random.Generator) -> list[RunLosses]:
        """Draw runs."""
        at = np.arange(1, POINTS + 1) / POINTS
        found = []
        for _ in range(self.runs):
            middle = self.middle * np.exp(rng.normal(0, self.spread))
            plateau = self.plateau * (1 + rng.normal(0, self.spread / 3))
            shares = self.curve(at, middle, plateau) + rng.normal(0, self.error, POINTS)
            found.append(RunLosses(trained=1e8 * at, training=at, domains={}, copying=shares))
        return found


#: Middles of a transition: with the steepness that was measured a reference copies 98, 90, 85, 65, 60, 37 and 12 %
#: at half of its tokens of what it copies at the end. Two long runs differed by 0.17 in the logarithm of the middle.
LEARNING = [
    Learning(middle=middle, runs=count, plateau=plateau, spread=spread)
    for count, spread, plateau in ((2, 0.15, 0.35), (8, 0.15, 0.35), (8, 0.15, 0.8), (3, 0.3, 0.35))
    for middle in (0.2, 0.294, 0.33, 0.4393, 0.4644, 0.6, 1.0)
]


def transitions(learning: Learning, studies: int, seed: int) -> dict[str, int]:
    """Return how often references that learn so are called mature, early or of unknown maturity."""
    rng = np.random.default_rng(seed)
    return dict(Counter(maturity_of(learning.draw(rng), 0.5, 1e8, None).state for _ in range(studies)))


def main() -> None:
    """Print a row per kind of study, and write the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--only", default="", help="part of a name of noise: without the transitions")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[dict]] = {"drift": [], "transition": []}
    print("settled, called early; would cross, called settled (per cent of the rows)")
    for seed, (name, size, noise) in enumerate(NOISES):
        if arguments.only not in name:
            continue
        counted = drifting(size, noise, studies=arguments.studies, seed=seed)
        found["drift"].append({"world": name, "gaps": size, "rows": {kind: vars(own) for kind, own in counted.items()}})
        for kind in kinds(size):
            own = counted[kind.name]
            said = ", ".join(
                f"{word} {100 * count / arguments.studies:.1f}" for word, count in sorted(own.verdicts.items())
            )
            print(f"{name:66s} {kind.name:38s} {'settled' if kind.settled else 'crosses'}: {said}", flush=True)
        drift, following = (
            100 * np.mean([getattr(own, part) for own in counted.values()]) / arguments.studies
            for part in ("drift_holds", "next_holds")
        )
        print(f"{name:66s} 90 % intervals hold: drift {drift:.1f}, gap over the next range {following:.1f}", flush=True)
    for seed, learning in enumerate([] if arguments.only else LEARNING):
        counted = transitions(replace(learning), 10 * arguments.studies, seed)
        found["transition"].append({**vars(learning), "ratio": learning.ratio, "states": counted})
        share = ", ".join(f"{state} {10 * count / arguments.studies:.1f}" for state, count in sorted(counted.items()))
        print(
            f"{learning.runs} runs, plateau {learning.plateau}, spread {learning.spread}: copies "
            f"{100 * learning.ratio:.0f} % of its end at half of its tokens: {share}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
