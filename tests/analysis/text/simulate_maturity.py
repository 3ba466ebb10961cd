"""How often rows are wrongly called early or settled: `python -m tests.analysis.text.simulate_maturity --json FILE`.

Two rules are simulated apart. Drift: studies whose gaps stand still, move away from the tolerance, or would cross it
over the next range. Transition: references that learn to copy long before the trained range begins, or within it.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


#: Name, size of the gaps, runs of a row and of the reference, noise of their runs, their wandering.
NOISES: Sequence[tuple[str, float, tuple[int, int], tuple[float, float], float]] = [
    ("noise 0.05, wander 0.02; 3 runs, reference 8", 0.2, (3, 8), (0.05, 0.05), 0.02),
    ("noise 0.05, wander 0.05; 3 runs, reference 8", 0.2, (3, 8), (0.05, 0.05), 0.05),
    ("noise 0.10, wander 0.05; 3 runs, reference 8", 0.4, (3, 8), (0.1, 0.1), 0.05),
    ("noise 0.05, reference 0.15, wander 0.05; 3 runs, reference 8", 0.4, (3, 8), (0.05, 0.15), 0.05),
    ("noise 0.10, wander 0.10; 6 runs, reference 12", 0.4, (6, 12), (0.1, 0.1), 0.1),
    ("noise 0.30, wander 0.10; 6 runs, reference 12", 0.8, (6, 12), (0.3, 0.3), 0.1),
    ("noise 0.05, wander 0.05; 2 runs, reference 2", 0.4, (2, 2), (0.05, 0.05), 0.05),
    ("noise 0.05, wander 0.02; 1 run, reference 5", 0.4, (1, 5), (0.05, 0.05), 0.02),
    ("noise 0.05, wander 0.02; 1 run, reference 2: these models only", 0.2, (1, 2), (0.05, 0.05), 0.02),
]


def drifting(
    size: float, seeds: tuple[int, int], noise: tuple[float, float], wander: float, *, studies: int, seed: int
) -> dict:
    """Return how often each kind of row got each verdict, by the kind's name."""
    rows = kinds(size)
    world = World(
        gaps=tuple(kind.gap for kind in rows),
        drifts=tuple(kind.drift for kind in rows),
        noise=(noise[1], *(noise[0],) * len(rows)),
        wander=wander,
        seeds=seeds[0],
        reference_seeds=seeds[1],
        documents=40,
        points=POINTS,
        speeds=(1.0,),
    )
    rng, verdicts = np.random.default_rng(seed), {kind.name: Counter() for kind in rows}
    for _ in range(studies):
        found = compare_runs(world.names, runs(world, rng), setting(60, 2000), np.random.default_rng(0))
        for kind, row in zip(rows, found.rows, strict=True):
            verdicts[kind.name][row.verdict] += 1
    return {name: dict(counted) for name, counted in verdicts.items()}


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
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[dict]] = {"drift": [], "transition": []}
    print("settled, called early; would cross, called settled (per cent of the rows)")
    for seed, (name, *noise) in enumerate(NOISES):
        counted = drifting(*noise, studies=arguments.studies, seed=seed)
        found["drift"].append({"world": name, "gaps": noise[0], "verdicts": counted})
        for kind in kinds(noise[0]):
            words = counted[kind.name]
            share = {word: 100 * count / arguments.studies for word, count in words.items()}
            said = ", ".join(f"{word} {value:.1f}" for word, value in sorted(share.items()))
            print(f"{name:66s} {kind.name:38s} {'settled' if kind.settled else 'crosses'}: {said}", flush=True)
    for seed, learning in enumerate(LEARNING):
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
