"""How many runs a verdict takes: after a study for its undecided rows, before it for the whole table."""

import math
from statistics import NormalDist

from basecap.analysis.intervals import TINY, Estimates
from basecap.analysis.rows import Gap
from basecap.analysis.student import student_quantile

#: More additional runs than these are not proposed.
MOST_RUNS = 100
#: 97.5 % quantile of the normal distribution.
NORMAL = 1.96
#: What limited-zoo's runs showed at 30M parameters and 60M tokens, in nats per token: standard deviations between runs
#: of the mean over unseen domains, of the reference (13 runs) and of the others (39 runs of 13 architectures, pooled),
#: and the standard error that documents add. The number of tokens does not enter: from 18M to 60M tokens the others'
#: deviation stayed between 0.044 and 0.060 and the reference's rose (results/intervals).
REFERENCE_ERROR, RUN_ERROR, DOCUMENT_ERROR = 0.09, 0.055, 0.016
#: Those of the reference on its quietest and its noisiest domain, in its ten runs of today's recipes.
DOMAIN_ERRORS = (0.03, 0.15)
#: Documents of its smallest unseen domain, and nats by which the reference's loss on unseen domains fell per factor of
#: e in tokens over the second half of training (0.71 to 1.20 in five runs).
DOCUMENTS, FALL = 54, 0.88


def reach(rows: int, runs: int, reference_runs: int, level: float) -> float:
    """Return about how many standard errors simultaneous intervals reach, before the runs are there.

    Student's quantile at `level` shared by the square root of the rows, as their errors are correlated, with as many
    degrees of freedom as each row has runs, times the fourth root of the rows, which share their variances; where rows
    have one run each the reference alone says how runs vary. A rule of thumb: the intervals of simulated studies of 1
    to 13 rows, 2 to 8 runs and once or twice as many of the reference, as noisy as the rows or 2.5 times as noisy,
    reached 0.78 to 1.20 times as far in nine designs of ten.
    """
    freedom = runs * rows**0.25 if runs > 1 else reference_runs - 1
    return -student_quantile(freedom, level / math.sqrt(max(1, rows)) / 2)


def more_runs(estimates: Estimates, index: int, counts: tuple[int, int], found: Gap, level: float) -> int | None:
    """Return how many more runs of a row and of the reference would decide it with probability one half.

    The estimate will move as runs are added: about its present value, with the variance that they take away. The range
    of differences between groups of the reference's runs shrinks with the root of their number.

    Args:
        estimates: of the table.
        index: of the row.
        counts: its runs and the reference's.
        found: its gap, with a tolerance.
        level: probability that the intervals together leave out something true.

    Returns:
        None where documents alone leave it undecided, or more than `MOST_RUNS` runs would be needed.
    """
    errors, (runs, reference_runs) = estimates.errors, counts
    assert found.tolerance is not None
    own, reference = errors.own[index] * runs, errors.reference[index] * reference_runs
    now = estimates.half.joint[index] / math.sqrt(errors.variance[index])
    split = 2 * NORMAL * math.sqrt(reference / reference_runs) if found.split is None else found.split
    for more in range(1, MOST_RUNS + 1):
        variance = own / (runs + more) + reference / (reference_runs + more) + errors.documents[index, index]
        half = min(now, reach(len(errors.own), runs + more, reference_runs + more, level)) * math.sqrt(variance)
        shrunk = split * math.sqrt(reference_runs / (reference_runs + more))
        moves = math.sqrt(max(errors.variance[index] - variance, TINY))
        degrades = NormalDist().cdf((found.value - max(half, shrunk)) / moves)
        if degrades + NormalDist().cdf((found.tolerance - half - found.value) / moves) > 0.5:
            return more
    return None


def expected_tolerance(cost: float) -> float:
    """Return how many nats per token a gap is that costs this share of the tokens of `limited-zoo`'s reference."""
    return -FALL * math.log1p(-cost)


def expected_half_width(
    rows: int, runs: int, reference_runs: int, documents: int = DOCUMENTS, level: float = 0.05
) -> float:
    """Return the half-width of simultaneous intervals to expect of a study, in nats per token.

    It supposes the noise that `limited-zoo` showed (30M parameters, 60M tokens). Other domains may be several times as
    noisy or as quiet; nothing is known of other sizes.

    Args:
        rows: architectures that are compared with the reference.
        runs: of each of them.
        reference_runs: of the reference.
        documents: in the unseen domain with the fewest, or clusters of them.
        level: probability that the intervals together leave out something true.

    Returns:
        Infinity where no variance of runs can be estimated.
    """
    if rows * (runs - 1) + reference_runs - 1 < 2:
        return math.inf
    variance = RUN_ERROR**2 / runs + REFERENCE_ERROR**2 / reference_runs
    variance += DOCUMENT_ERROR**2 * DOCUMENTS / documents
    return reach(rows, runs, reference_runs, level) * math.sqrt(variance)
