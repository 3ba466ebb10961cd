"""How many runs a verdict takes: after a study for its undecided rows, before it for the whole table."""

import math

import numpy as np
from scipy.special import stdtrit

from basecap.analysis.intervals import Estimates
from basecap.analysis.rows import Gap

#: More additional runs than these are not proposed.
MOST_RUNS = 100


def more_runs(estimates: Estimates, index: int, counts: tuple[int, int], found: Gap) -> int | None:
    """Return how many more runs of a row and of the reference would decide it if the estimate stayed what it is.

    Args:
        estimates: of the table.
        index: of the row.
        counts: its runs and the reference's.
        found: its gap, with a tolerance.

    Returns:
        None where documents alone leave it undecided, or more than `MOST_RUNS` runs would be needed.
    """
    errors = estimates.errors
    assert found.tolerance is not None
    beyond_split = found.value > (found.split or 0.0)
    target = max(found.value if beyond_split else 0.0, found.tolerance - found.value)
    own, reference = errors.own[index] * counts[0], errors.reference[index] * counts[1]
    documents = errors.documents[index, index]
    for more in range(1, MOST_RUNS + 1):
        variance = own / (counts[0] + more) + reference / (counts[1] + more) + documents
        freedom = min(errors.own_freedom[index] + more, 1e6)
        if -stdtrit(freedom, estimates.level / 2) * math.sqrt(variance) < target:
            return more
    return None


def expected_half_width(
    rows: int, runs: int, reference_runs: int, *, run_error: float, document_error: float, level: float = 0.05
) -> float:
    """Return the half-width to expect of simultaneous intervals before a study is run, in nats per token.

    Args:
        rows: architectures that are compared with the reference.
        runs: of each of them.
        reference_runs: of the reference.
        run_error: standard deviation of a run's level.
        document_error: standard error of a difference by the documents.
        level: probability that the intervals together leave out something true.

    Returns:
        Infinity with fewer than two runs of everything: no variance of runs can be estimated.
    """
    freedom = rows * (runs - 1) + reference_runs - 1
    if freedom < 2:
        return math.inf
    variance = run_error**2 * (1 / runs + 1 / reference_runs) + document_error**2
    single = 1 - (1 - level) ** (1 / max(1, rows))  # rows share the reference: a little wider than needed
    return float(-stdtrit(freedom, single / 2) * np.sqrt(variance))
