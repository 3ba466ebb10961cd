"""The training steps that a run recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from basecap.analysis.files import read_metrics
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
        rows = read_metrics(run)
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
        ends = np.searchsorted(self.step, steps, side="right")
        starts = np.searchsorted(self.step, np.multiply(steps, 1 - SMOOTHING), side="right")
        recent = [self.loss[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        return np.array([np.add.reduce(part) / len(part) if len(part) else np.nan for part in recent])
