"""How often the intervals hold: `python -m tests.analysis.text.simulate > results/intervals/simulated.txt`.

Each row is a kind of study, simulated many times. Part of it runs in the tests, with fewer studies.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from basecap.analysis.rows import Row
from basecap.analysis.sequential import level_of_last_look, next_look
from basecap.analysis.text.comparison import compare_runs
from basecap.analysis.text.measured import Setting
from tests.analysis.text.made_up import REFERENCE, World, fall, runs, setting

SETTING = setting()


@dataclass(frozen=True)
class Coverage:
    """What the intervals of simulated studies did.

    Attributes:
        rows: share of single intervals that hold the truth, by row [A].
        family: share of studies in which some simultaneous interval does not.
        wrong: share of studies with a wrong verdict: *keeps* of a gap above the true tolerance, *degrades* of none.
        below: share of studies that call a gap *degrades* that is none or below the true tolerance.
        worth: share of studies in which some interval of what a gap is worth does not hold the truth.
        half_width: mean half-width of the simultaneous intervals.
        decided: share of rows that were decided.
        none: share of rows without an interval.
    """

    rows: np.ndarray
    family: float
    wrong: float
    below: float
    worth: float
    half_width: float
    decided: float
    none: float


def simulate(world: World, studies: int, seed: int, most: int = 0, setting: Setting = SETTING) -> Coverage:
    """Simulate studies of one world; with `most`, each is looked at again with more seeds until all is decided."""
    rng = np.random.default_rng(seed)
    found = [_study(world, rng, most, setting) for _ in range(studies)]
    truth = np.array(world.gaps)
    slope = fall(world.points)
    singles, joints, wrong, below, worth, widths = [], [], [], [], [], []
    for rows in found:
        gaps = [row.gap for row in rows]
        known = [gap for gap in gaps if gap is not None]
        if len(known) < len(gaps):
            continue
        ends = np.array([[gap.single.low, gap.single.high, gap.low, gap.high] for gap in known])
        singles.append((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
        joints.append(np.any((ends[:, 2] > truth) | (truth > ends[:, 3])))
        widths.append((ends[:, 3] - ends[:, 2]).mean() / 2)
        tolerance = slope * np.log1p(-setting.cost)
        wrong.append(any(_wrong(row, value, tolerance) for row, value in zip(rows, truth, strict=True)))
        degraded = [row.verdict == "degrades" for row in rows]
        below.append(any(said and value <= tolerance for said, value in zip(degraded, truth, strict=True)))
        shares = [gap.tokens for gap in known]
        outside = [
            share is not None and not share.low <= np.exp(value / slope) <= share.high
            for share, value in zip(shares, truth, strict=True)
        ]
        worth.append(any(outside))
    verdicts = [row.verdict in ("keeps", "degrades") for rows in found for row in rows]
    return Coverage(
        rows=np.mean(singles, axis=0),
        family=float(np.mean(joints)),
        wrong=float(np.mean(wrong)),
        below=float(np.mean(below)),
        worth=float(np.mean(worth)),
        half_width=float(np.mean(widths)),
        decided=float(np.mean(verdicts)),
        none=1 - len(singles) / studies,
    )


def _study(world: World, rng: np.random.Generator, most: int, setting: Setting) -> list[Row]:
    if not most:
        return compare_runs(world.names, runs(world, rng), setting, np.random.default_rng(0)).rows
    ratio = world.reference_seeds / world.seeds
    every = runs(replace(world, seeds=most, reference_seeds=round(most * ratio)), rng)
    looks = [world.seeds]
    while True:
        level = level_of_last_look(looks, most, 0.05)
        seeds = {REFERENCE: round(looks[-1] * ratio)}
        held = {key: run for key, run in every.items() if key[1] < seeds.get(key[0], looks[-1])}
        rows = compare_runs(world.names, held, replace(setting, level=level), np.random.default_rng(0)).rows
        if looks[-1] == most or all(row.verdict in ("keeps", "degrades") for row in rows):
            return rows
        looks.append(next_look(looks[-1], most))


def _wrong(row: Row, truth: float, tolerance: float) -> bool:
    return (row.verdict == "keeps" and truth > tolerance) or (row.verdict == "degrades" and truth <= 0)


EIGHT = (0.0,) * 8
AT_TOLERANCE = World(
    gaps=(fall(20) * np.log(0.9) * 1.001,) * 8,
    wobble=0.002,
    taste=0.005,
    documents=200,
    tilt=-0.2 * fall(20),
    lean=0.7,
)
#: Name, world and the most seeds of studies that are looked at repeatedly.
WORLDS: Sequence[tuple[str, World, int]] = [
    ("documents alone, 3 seeds", World(gaps=EIGHT, noise=(0.0,) * 9), 0),
    ("noise 0.05, 2 seeds", World(gaps=EIGHT, noise=(0.05,) * 9, seeds=2, reference_seeds=2), 0),
    ("noise 0.05, 3 seeds", World(gaps=EIGHT, noise=(0.05,) * 9), 0),
    ("noise 0.05, 5 seeds, reference 10", World(gaps=EIGHT, noise=(0.05,) * 9, seeds=5, reference_seeds=10), 0),
    ("noise 0.01 to 0.10, 3 seeds", World(gaps=EIGHT, noise=(0.05, *np.geomspace(0.01, 0.1, 8))), 0),
    ("noisy reference 0.12, 3 seeds", World(gaps=EIGHT, noise=(0.12, *(0.04,) * 8)), 0),
    (
        "noisy reference 0.12, others 0.005 to 0.07, 5 seeds, reference 10",
        World(gaps=EIGHT, noise=(0.12, *np.geomspace(0.005, 0.07, 8)), seeds=5, reference_seeds=10),
        0,
    ),
    ("noise 0.05, 1 seed, reference 5", World(gaps=EIGHT, noise=(0.05,) * 9, seeds=1, reference_seeds=5), 0),
    ("noise 0.05, two architectures, 3 seeds", World(gaps=(0.0,), noise=(0.05, 0.05)), 0),
    ("noise 0.02, clusters of 3", World(gaps=EIGHT, noise=(0.02,) * 9, cluster=3, documents=120, taste=0.1), 0),
    ("noise 0.02, clusters of 3, 5 seeds", World(gaps=EIGHT, noise=(0.02,) * 9, cluster=3, documents=120, seeds=5), 0),
    ("gaps 0 to 0.15, noise 0.05, 5 seeds", World(gaps=tuple(np.linspace(0, 0.15, 8)), noise=(0.05,) * 9, seeds=5), 0),
    ("noise 0.05, looks from 2 to 8 seeds", World(gaps=EIGHT, noise=(0.05,) * 9, seeds=2, reference_seeds=4), 8),
    # Gaps just above the tolerance of 0.0171 nats, runs so quiet that its error counts; falls differ by a fifth.
    ("gaps at the tolerance, 3 seeds", replace(AT_TOLERANCE, noise=(0.0019,) * 9), 0),
    (
        "gaps at the tolerance, 5 seeds, reference 10",
        replace(AT_TOLERANCE, noise=(0.0029,) * 9, seeds=5, reference_seeds=10),
        0,
    ),
]


def main() -> None:
    """Print a row per world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=400)
    parser.add_argument("--only", default="", help="part of a world's name")
    arguments = parser.parse_args()
    print(f"Nominal 95 % intervals in {arguments.studies} simulated studies a row; per cent but half-widths, in nats.")
    print("mean, worst: single intervals that hold the truth, over rows; family: studies with a simultaneous interval")
    print("that does not; wrong: studies with a wrong verdict; below: studies that call a gap below the tolerance")
    print("degraded; worth: studies with a simultaneous interval of what a gap is worth that does not hold it; half:")
    print("mean half-width; decided: rows; none: no interval.")
    for index, (name, world, most) in enumerate(WORLDS):
        if arguments.only in name:
            found = simulate(world, arguments.studies, seed=index, most=most)
            print(
                f"{name:68s} mean {100 * found.rows.mean():5.1f} worst {100 * found.rows.min():5.1f} "
                f"family {100 * found.family:4.1f} wrong {100 * found.wrong:4.1f} below {100 * found.below:4.1f} "
                f"worth {100 * found.worth:4.1f} half {found.half_width:.4f} "
                f"decided {100 * found.decided:5.1f} none {100 * found.none:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
