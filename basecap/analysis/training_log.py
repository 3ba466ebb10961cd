"""The training steps that a run recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from pydantic_core import from_json

from basecap.analysis.study_files import read_metrics
from basecap.records import RunRecords
from basecap.system.files import read_array

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
        columns = _columns(run)
        return cls(
            step=columns["step"],
            tokens=columns["tokens"],
            loss=columns["train_loss"],
            tokens_per_s=columns["tokens_per_s"],
            seconds=columns["seconds"],
        )

    def __len__(self) -> int:
        return len(self.step)

    def smoothed_loss(self, steps: Sequence[int]) -> ndarray:
        """Return the training loss after each of `steps`, a mean over recent steps; NaN where none was recorded."""
        ends = np.searchsorted(self.step, steps, side="right")
        starts = np.searchsorted(self.step, np.multiply(steps, 1 - SMOOTHING), side="right")
        recent = [self.loss[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        return np.array([np.add.reduce(part) / len(part) if len(part) else np.nan for part in recent])


def _columns(run: RunRecords) -> dict[str, ndarray]:
    """Return the columns of metrics.jsonl. Rows are checked one by one only where a column is not of its type."""
    kinds = {"step": int, "tokens": int, "train_loss": float, "tokens_per_s": float, "seconds": float}
    try:
        rows = from_json(read_array(run.path / "metrics.jsonl"))
        found = {name: np.array([row[name] for row in rows]) for name in kinds}
    except (ValueError, TypeError, KeyError):  # damaged
        found = {}
    if not found or any(column.dtype != kinds[name] for name, column in found.items()):
        checked = read_metrics(run)
        found = {name: np.array([getattr(row, name) for row in checked], kinds[name]) for name in kinds}
    return found
