"""Where the time of a run goes."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

#: Parts of a run's time: the model is built, restored and compiled (until its first step ends), the other steps, the
#: evaluation points with the copy of weights that they keep, and checkpoints: their copies, and waiting for the disk.
PARTS = ("start", "steps", "evaluations", "checkpoints")
#: The time of everything, also of what is in no part, such as progress between steps.
ALL = "all"


class WallTime:
    """A clock for the parts of the time that a process spends on a run; it starts with the object."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """Take what returns monotonic seconds."""
        self._clock = clock
        self._began = clock()
        self._parts = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the context to a part."""
        since = self._clock()
        try:
            yield
        finally:
            self._parts[name] += self._clock() - since

    def seconds(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of each part and of everything, with those of the processes `before`; to a millisecond.

        >>> ticks = iter([0.0, 1.0, 3.5, 4.0])
        >>> wall = WallTime(lambda: next(ticks))
        >>> with wall.part("steps"):
        ...     pass
        >>> wall.seconds({"steps": 1.0, "all": 2.0})
        {'start': 0.0, 'steps': 3.5, 'evaluations': 0.0, 'checkpoints': 0.0, 'all': 6.0}
        """
        found = self._parts | {ALL: self._clock() - self._began}
        return {name: round(before.get(name, 0.0) + value, 3) for name, value in found.items()}


def shares(seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each part in the time of several runs together, {} for runs without a recorded time.

    >>> shares([{"steps": 8.0, "evaluations": 1.0, "all": 10.0}, {}])
    {'start': 0.0, 'steps': 0.8, 'evaluations': 0.1, 'checkpoints': 0.0}
    """
    found = list(seconds)
    whole = sum(run.get(ALL, 0.0) for run in found)
    return {name: sum(run.get(name, 0.0) for run in found) / whole for name in PARTS} if whole else {}
