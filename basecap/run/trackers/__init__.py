"""Trackers of runs, one file each: what `basecap run --track` passes the recorded rows to."""

from basecap.run.trackers._contract import TRACKERS, TrackedRun, Tracker, tracker
from basecap.run.trackers._following import Follower, chosen_trackers

__all__ = ["TRACKERS", "Follower", "TrackedRun", "Tracker", "chosen_trackers", "tracker"]
