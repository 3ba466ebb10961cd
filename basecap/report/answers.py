"""Shares of right answers over the runs of an architecture."""

from collections.abc import Sequence

from basecap.analysis.results import AnswerRow
from basecap.analysis.rows import Interval
from basecap.analysis.tasks.shares import Share, estimate


def over_runs(rows: Sequence[AnswerRow]) -> Interval:
    """Return the mean of one share over runs, one row of each, and its interval (see `shares.estimate`)."""
    return estimate([{None: Share(row.value or 0.0, row.n)} for row in rows], {None: 1.0})
