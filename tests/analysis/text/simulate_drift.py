"""How often 90 % intervals of drifts hold: `python -m tests.analysis.text.simulate_drift`.

A drift is one number per run, as a level is: they are drawn, without documents. `simulate_maturity` says the same of
whole curves.
"""

import argparse

import numpy as np

from basecap.analysis.text.maturity import DIRECTION_LEVEL
from tests.analysis.text.simulate_one_run import Design, table_of

#: Architectures differ in noise as they were measured to; the reference varies as they do, or 1.5 times as much.
DESIGNS = [
    Design([runs] * rows, reference, 4, factor)
    for rows in (5, 15)
    for factor in (1, 1.5)
    for reference in (4, 8)
    for runs in (1, 2, 3, 8)
]


def holds(design: Design, tables: int, seed: int, draws: int = 1000) -> tuple[float, float]:
    """Return which share of the intervals holds the truth, and their median half-width in typical deviations."""
    rng = np.random.default_rng(seed)
    held, halves = [], []
    for _ in range(tables):
        found = table_of(design.draw(rng), draws, DIRECTION_LEVEL).estimate(np.ones(1))
        held.append(np.abs(found.value) <= found.half.single)
        halves.append(found.half.single)
    return float(np.mean(held)), float(np.median(halves))


def main() -> None:
    """Print a line per kind of table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=400)
    arguments = parser.parse_args()
    for design in DESIGNS:
        share, half = holds(design, arguments.tables, seed=0)
        print(
            f"{len(design.counts)} rows of {design.counts[0]}, reference of {design.reference} varies "
            f"{design.factor:g} times as much: {100 * share:.1f} % hold, half-width {half:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
