"""The training steps that a run recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.files import Metrics, parse_rows
from basecap.records import RunRecords

#: The training loss at an evaluation point is its mean over the last twentieth of the steps so far.
SMOOTHING = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """S steps in order, arrays [S]: step and tokens at its end, training loss, tokens per second and seconds."""

    step: ndarray
    tokens: ndarray
    loss: ndarray
    tokens_per_s: ndarray
    seconds: ndarray

    @classmethod
    def read(cls, run: RunRecords) -> "TrainingLog":
        """Read metrics.jsonl; raises DataError for a damaged row."""
        path = run.path / "metrics.jsonl"
        rows = parse_rows(run.metrics(), Metrics, path)
        return cls(
            step=np.array([row.step for row in rows], dtype=np.int64),
            tokens=np.array([row.tokens for row in rows], dtype=np.int64),
            loss=np.array([row.train_loss for row in rows], dtype=np.float64),
            tokens_per_s=np.array([row.tokens_per_s for row in rows], dtype=np.float64),
            seconds=np.array([row.seconds for row in rows], dtype=np.float64),
        )

    def __len__(self) -> int:
        return len(self.step)

    def smoothed_loss(self, steps: Sequence[int]) -> ndarray:
        """Return the training loss after each of `steps`, a mean over recent steps; NaN where none was recorded."""
        recent = [self.loss[(self.step <= step) & (self.step > step * (1 - SMOOTHING))] for step in steps]
        return np.array([part.mean() if len(part) else np.nan for part in recent])
