"""How many runs a verdict takes: after a study for its undecided rows, before it for the whole table."""

import math

from scipy.special import stdtrit

from basecap.analysis.intervals import Estimates
from basecap.analysis.rows import Gap

#: More additional runs than these are not proposed.
MOST_RUNS = 100
#: What limited-zoo's 42 runs showed at 30M parameters, in nats per token: standard deviations between runs of the mean
#: over unseen domains, of the reference and of the others in their median, and the standard error that documents add.
REFERENCE_ERROR, RUN_ERROR, DOCUMENT_ERROR = 0.12, 0.055, 0.016


def reach(rows: int, reference_runs: int, level: float) -> float:
    """Return about how many standard errors simultaneous intervals reach, before the runs are there.

    Student's quantile with as many degrees of freedom as the reference has runs, at `level` shared by the square root
    of the rows, as their errors are correlated: a rule of thumb that agrees with the intervals of simulated studies of
    8 to 13 rows and 3 to 10 runs of the reference within 10 %.
    """
    return float(-stdtrit(reference_runs, level / math.sqrt(max(1, rows)) / 2))


def more_runs(estimates: Estimates, index: int, counts: tuple[int, int], found: Gap, level: float) -> int | None:
    """Return how many more runs of a row and of the reference would decide it if the estimate stayed what it is.

    Args:
        estimates: of the table.
        index: of the row.
        counts: its runs and the reference's.
        found: its gap, with a tolerance.
        level: probability that the intervals together leave out something true.

    Returns:
        None where documents alone leave it undecided, or more than `MOST_RUNS` runs would be needed.
    """
    errors = estimates.errors
    assert found.tolerance is not None
    beyond_split = found.value > (found.split or 0.0)
    target = max(found.value if beyond_split else 0.0, found.tolerance - found.value)
    own, reference = errors.own[index] * counts[0], errors.reference[index] * counts[1]
    now = estimates.half.joint[index] / math.sqrt(errors.variance[index])
    for more in range(1, MOST_RUNS + 1):
        variance = own / (counts[0] + more) + reference / (counts[1] + more) + errors.documents[index, index]
        if min(now, reach(len(errors.own), counts[1] + more, level)) * math.sqrt(variance) < target:
            return more
    return None


def expected_half_width(rows: int, runs: int, reference_runs: int, level: float = 0.05) -> float:
    """Return the half-width of simultaneous intervals to expect of a study, in nats per token.

    It supposes the noise that `limited-zoo` showed (30M parameters, 60M tokens); larger models trained longer are
    quieter.

    Args:
        rows: architectures that are compared with the reference.
        runs: of each of them.
        reference_runs: of the reference.
        level: probability that the intervals together leave out something true.

    Returns:
        Infinity where no variance of runs can be estimated.
    """
    if rows * (runs - 1) + reference_runs - 1 < 2:
        return math.inf
    variance = RUN_ERROR**2 / runs + REFERENCE_ERROR**2 / reference_runs + DOCUMENT_ERROR**2
    return reach(rows, reference_runs, level) * math.sqrt(variance)
