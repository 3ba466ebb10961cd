"""How the runs of a study are watched, beside their records."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from basecap.errors import ConfigError
from basecap.plan.runs import RunSpec
from basecap.run.trackers import chosen_trackers
from basecap.train.profile import MOST_STEPS


@dataclass(frozen=True, kw_only=True)
class Watching:
    """How runs are watched.

    Attributes:
        trackers: names of `basecap.run.trackers` to pass the rows on to, with where, or None.
        profile: the first and last training step to trace, counted from 1.
    """

    trackers: dict[str, str | None] = field(default_factory=dict)
    profile: tuple[int, int] | None = None

    def refuse_beyond(self, runs: Iterable[RunSpec]) -> None:
        """Raise ConfigError where the steps to trace begin after the last step of every run."""
        most = max(run.timetable.end for run in runs)
        if self.profile is not None and self.profile[0] > most:
            asked = ":".join(map(str, self.profile))
            raise ConfigError(f"--profile {asked}: the longest run has {most:,} steps; give earlier ones.")


UNWATCHED = Watching()


def watching(track: Sequence[str], profile: str | None) -> Watching:
    """Return what the options --track and --profile say; raises ConfigError."""
    return Watching(trackers=chosen_trackers(track), profile=parse_profile(profile))


def parse_profile(text: str | None) -> tuple[int, int] | None:
    """Return the steps of `--profile FIRST:LAST`, or of `--profile STEP`; raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,11})(?::([1-9][0-9]{0,11}))?", text)
    if found is None:
        raise ConfigError(f"--profile {text}: give the first and the last step, counted from 1, such as 10:13.")
    first = int(found[1])
    last = int(found[2] or first)
    if not first <= last < first + MOST_STEPS:
        raise ConfigError(f"--profile {text}: give at most {MOST_STEPS} steps, the first before the last.")
    return first, last
