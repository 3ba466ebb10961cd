"""How long the runs of a study take side by side on several GPUs."""

import heapq
from collections.abc import Sequence


def wall_time(seconds: Sequence[float], gpus: int) -> float:
    """Return the seconds until all runs have ended, each on one GPU; the longest begin first.

    >>> wall_time([3.0, 1.0, 2.0, 2.0], gpus=2), wall_time([3.0, 1.0], gpus=8)
    (4.0, 3.0)
    """
    free = [0.0] * min(gpus, len(seconds))
    for run in sorted(seconds, reverse=True):
        heapq.heapreplace(free, free[0] + run)
    return max(free, default=0.0)
