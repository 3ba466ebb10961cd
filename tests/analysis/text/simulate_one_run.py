"""How often intervals hold where rows have one run: `python -m tests.analysis.text.simulate_one_run --json FILE`.

Levels of runs are drawn, without documents: they alone decide how intervals of few runs hold. Architectures differ in
how much their runs vary as variances of so many degrees of freedom do.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from basecap.analysis.text.intervals import Levels, Table

NONE = (np.zeros((1, 1)), 1.0)


@dataclass(frozen=True)
class Design:
    """A kind of table.

    Attributes:
        counts: runs of each row.
        reference: runs of the reference.
        spread: degrees of freedom by which the variances of architectures differ, 0 where all are equal.
        factor: of the reference's deviation.
    """

    counts: Sequence[int]
    reference: int
    spread: float = 0.0
    factor: float = 1.0

    def draw(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw levels without gaps, in typical deviations: the reference's first."""
        size = len(self.counts) + 1
        variances = self.spread / rng.chisquare(self.spread, size) if self.spread else np.ones(size)
        variances[0] *= self.factor**2
        runs = (self.reference, *self.counts)
        return [rng.normal(0, np.sqrt(own), count) for own, count in zip(variances, runs, strict=True)]


@dataclass
class Found:
    """What intervals did, in per cent of rows or of tables; half-widths (medians) in typical deviations.

    `one` and `several` are rows of one run and of several: how many intervals of a row alone hold, and half-widths of
    those alone and of all rows together; empty without such rows. `wrong` are tables with a wrong simultaneous
    interval.
    """

    wrong: float
    one: dict[str, float] = field(default_factory=dict)
    several: dict[str, float] = field(default_factory=dict)


def table_of(levels: Sequence[np.ndarray], draws: int, level: float = 0.05) -> Table:
    """Return the table of these levels, which no document moves; its intervals are wrong with probability `level`."""
    reference, *rows = (own[:, None, None].repeat(3, axis=1) for own in levels)
    own = [Levels(own=row, reference=reference, scatter=lambda: (NONE, NONE)) for row in rows]
    return Table(own, reference, documents=1000, level=level, draws=draws)


def simulate(design: Design, tables: int, seed: int, draws: int = 5000) -> Found:
    """Simulate tables of one kind."""
    rng = np.random.default_rng(seed)
    several = np.array(design.counts) > 1
    numbers, wrong = [], 0
    for _ in range(tables):
        found = table_of(design.draw(rng), draws).estimate(np.ones(1))
        distance = np.abs(found.value)
        numbers.append([distance <= found.half.single, found.half.single, found.half.joint])
        wrong += bool((distance > found.half.joint).any())
    every = np.array(numbers, dtype=float)  # [tables, 3, rows]
    parts = {
        name: dict(zip(("holds", "alone", "together"), _summary(every[:, :, kept]), strict=True))
        for name, kept in (("one", ~several), ("several", several))
        if kept.any()
    }
    return Found(wrong=round(100 * wrong / tables, 1), **parts)


def _summary(found: np.ndarray) -> list[float]:
    share = 100 * float(found[:, 0].mean())
    return [round(share, 1), *np.round(np.median(found[:, 1:], axis=(0, 2)), 2).tolist()]


ROWS = ([1] * 5, [1] * 15, [2] + [1] * 14, [2] * 7 + [1] * 8, [2] * 15)
DESIGNS = [
    *(Design(rows, 4, spread) for rows in ROWS for spread in (0, 4)),
    *(Design(rows, 4, spread) for rows in ROWS[1:3] for spread in (2, 8)),
    *(Design(rows, 8, spread) for rows in ROWS[1:3] for spread in (0, 4)),
    *(Design(ROWS[0], 4, 4, factor) for factor in (0.5, 2)),
]


def main() -> None:
    """Print a line per kind of table, and write the numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for seed, design in enumerate(DESIGNS):
        own = simulate(design, arguments.tables, seed)
        found.append({**asdict(design), **asdict(own)})
        rows = ", ".join(f"{design.counts.count(runs)} of {runs}" for runs in sorted({*design.counts}))
        print(
            f"reference {design.reference} runs x{design.factor:g}, rows {rows}, spread {design.spread:g}: "
            f"wrong {own.wrong}; one {own.one}; several {own.several}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
