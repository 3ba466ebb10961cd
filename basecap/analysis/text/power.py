"""How many runs a verdict takes: after a study for its undecided rows, before it for the whole table."""

import math
from dataclasses import dataclass
from statistics import NormalDist

from basecap.analysis.rows import LEVEL, Gap
from basecap.analysis.student import student_quantile
from basecap.analysis.text.intervals import TINY, Estimates

#: More additional runs than these are not proposed.
MOST_RUNS = 100
#: Degrees of freedom of rows with one run each: what is not known of their own variance outweighs the reference's runs.
ONE_RUN = 2.3
#: 97.5 % quantile of the normal distribution.
NORMAL = 1.96


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How much the runs of a measured study varied, in nats per token on the mean over unseen domains.

    Attributes:
        study, size: its name, and its size in words.
        tokens: of each run.
        reference, rows: standard deviation between runs of the reference, and of the others, pooled.
        domains: that of the reference on its quietest and its noisiest domain.
        documents: standard error that documents add, and their number in the smallest unseen domain, or that of
            clusters where those are drawn.
        fall: how far the reference's loss on unseen domains fell per factor of e in tokens, over the second half of
            training.
    """

    study: str
    size: str
    tokens: float
    reference: float
    rows: float
    domains: tuple[float, float]
    documents: tuple[float, int]
    fall: float


#: quickstart: 12 runs of the reference and 7 each of two others. limited-zoo: ten of the reference and 78 of 13 others,
#: half of them with earlier recipes, where from 18M to 60M tokens the others' deviation stayed between 0.044 and 0.060
#: and the reference's rose; after 150M tokens 8 of the reference and 39 of 13 others; and after 240M tokens of seven
#: times the text, where all runs of the reference are past its transition, 4 of it and 21 of 13 others
#: (results/intervals).
MEASURED = (
    Noise(study="quickstart", size="0.1M parameters, 0.5M tokens", tokens=0.5e6, reference=0.032, rows=0.019,
          domains=(0.017, 0.054), documents=(0.005, 33), fall=0.36),
    Noise(study="limited-zoo", size="30M parameters, 60M tokens", tokens=60e6, reference=0.09, rows=0.07,
          domains=(0.03, 0.15), documents=(0.016, 54), fall=0.72),
    Noise(study="limited-zoo", size="30M parameters, 150M tokens", tokens=150e6, reference=0.114, rows=0.051,
          domains=(0.047, 0.180), documents=(0.014, 54), fall=0.173),
    Noise(study="limited-zoo", size="30M parameters, 240M tokens of 200M", tokens=240e6, reference=0.010, rows=0.040,
          domains=(0.009, 0.038), documents=(0.010, 54), fall=0.348),
)  # fmt: skip


def noise_of(tokens: float) -> Noise:
    """Return the noise of the measured study whose runs saw about as many tokens."""
    return min(MEASURED, key=lambda known: abs(math.log(known.tokens / tokens)))


def reach(rows: int, runs: int, reference_runs: int, level: float, sharing: int | None = None) -> float:
    """Return about how many standard errors simultaneous intervals reach, before the runs are there.

    Student's quantile at `level` shared by the square root of the rows, as their errors are correlated, with as many
    degrees of freedom as a row has runs, times the fourth root of the rows that are `sharing` their variances, by
    default all; rows with one run each may vary more than the reference, which alone says how runs vary. A rule of
    thumb: the intervals of simulated studies of 1 to 13 rows, 2 to 8 runs and once or twice as many of the reference,
    as noisy as the rows or 2.5 times as noisy, reached 0.78 to 1.20 times as far in nine designs of ten.
    """
    freedom = runs * (rows if sharing is None else sharing) ** 0.25 if runs > 1 else min(ONE_RUN, reference_runs - 1)
    return -student_quantile(freedom, level / math.sqrt(max(1, rows)) / 2)


def more_runs(
    estimates: Estimates, index: int, counts: tuple[int, int], several: int, found: Gap, level: float
) -> int | None:
    """Return how many more runs of a row and of the reference would decide it with probability one half.

    The estimate will move as runs are added: about its present value, with the variance that they take away. The range
    of differences between groups of the reference's runs shrinks with the root of their number.

    Args:
        estimates: of the table.
        index: of the row.
        counts: its runs and the reference's.
        several: how many other rows have several runs.
        found: its gap, with a tolerance.
        level: probability that the intervals together leave out something true.

    Returns:
        None where documents alone leave it undecided, or more than `MOST_RUNS` runs would be needed.
    """
    errors, (runs, reference_runs) = estimates.errors, counts
    assert found.tolerance is not None
    own, reference = errors.own[index] * runs, errors.reference[index] * reference_runs
    now = estimates.half.joint[index] / math.sqrt(errors.variance[index])
    rows = len(errors.own)
    sharing = min(rows, several + 2)  # with it and the reference
    split = 2 * NORMAL * math.sqrt(reference / reference_runs) if found.split is None else found.split
    for more in range(1, MOST_RUNS + 1):
        variance = own / (runs + more) + reference / (reference_runs + more) + errors.documents[index, index]
        half = min(now, reach(rows, runs + more, reference_runs + more, level, sharing)) * math.sqrt(variance)
        shrunk = split * math.sqrt(reference_runs / (reference_runs + more))
        moves = math.sqrt(max(errors.variance[index] - variance, TINY))
        degrades = NormalDist().cdf((found.value - max(half, shrunk, found.tolerance)) / moves)
        if degrades + NormalDist().cdf((found.tolerance - half - found.value) / moves) > 0.5:
            return more
    return None


def expected_tolerance(noise: Noise, cost: float) -> float:
    """Return how many nats per token a gap is that costs this share of the tokens of that study's reference."""
    return -noise.fall * math.log1p(-cost)


def expected_half_width(noise: Noise, rows: int, runs: int, reference_runs: int, documents: int | None = None) -> float:
    """Return the half-width of simultaneous intervals to expect of a study, in nats per token.

    Args:
        noise: how runs vary. Other domains may be several times as noisy or as quiet.
        rows: architectures that are compared with the reference.
        runs: of each of them.
        reference_runs: of the reference.
        documents: in the unseen domain with the fewest, or clusters of them; None: as many as the measured study had.

    Returns:
        Infinity where no variance of runs can be estimated.
    """
    if rows * (runs - 1) + reference_runs - 1 < 2:
        return math.inf
    error, count = noise.documents
    variance = noise.rows**2 / runs + noise.reference**2 / reference_runs
    variance += error**2 * count / (documents or count)
    return reach(rows, runs, reference_runs, LEVEL) * math.sqrt(variance)
