"""How much architectures differ in how their runs vary: `python -m tests.analysis.text.spread RECORDS...`.

Prints how likely degrees of freedom of the distribution of their variances are, given the runs of each study and of all
together, the reference left out. Nothing is assumed of them before.
"""

import argparse
from pathlib import Path

import numpy as np

from basecap.analysis import TextResults, analyse
from basecap.analysis.text import noise
from basecap.analysis.text.noise import Runs, Shared

#: More of them than the analysis has.
FREEDOMS = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0])


def main() -> None:
    """Print a line per study and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    paths = parser.parse_args().records
    noise.SHARED_FREEDOMS = FREEDOMS
    whole = np.ones(len(FREEDOMS))
    for path, study in zip(paths, analyse(paths), strict=True):
        assert isinstance(study, TextResults)
        runs = [Runs.of(np.array(row.gaps)) for row in study.comparisons if len(row.gaps) > 1]
        shared = Shared.fitted(runs)
        assert shared is not None
        whole *= shared.likely.sum(1)
        _print(f"{path}, {len(runs)} rows", shared.likely.sum(1))
    _print("all", whole / whole.sum())


def _print(name: str, likely: np.ndarray) -> None:
    shares = ", ".join(f"{free:g}: {100 * share:.1f} %" for free, share in zip(FREEDOMS, likely, strict=True))
    print(f"{name}: {shares}")


if __name__ == "__main__":
    main()
