"""What a run trains on and is tested on: text (`PreparedData`) or a task (`TaskData`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from basecap.errors import ConfigError

if TYPE_CHECKING:  # processes that prepare text import this module and have no use for torch
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """What a model reads and what it has to predict.

    Attributes:
        inputs: int64 [B, T].
        targets: int64 [B, T], the token to give after reading a position; -1: none.
        segments: int64 [B, T], which document of its row a token belongs to; None where a row is one document.
    """

    inputs: "Tensor"
    targets: "Tensor"
    segments: "Tensor | None" = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.inputs)

    def to(self, device: "torch.device") -> "Batch":
        """Return the batch on a device; a copy to a GPU need not have ended."""
        inputs, targets = (part.to(device, non_blocking=True) for part in (self.inputs, self.targets))
        return Batch(inputs, targets, self.segments if self.segments is None else self.segments.to(device))

    def split(self, rows: int) -> Iterator["Batch"]:
        """Yield pieces of so many rows."""
        for first in range(0, len(self), rows):
            part = slice(first, first + rows)
            segments = self.segments if self.segments is None else self.segments[part]
            yield Batch(self.inputs[part], self.targets[part], segments)

    @property
    def parts(self) -> tuple["Tensor", "Tensor", "Tensor | None"]:
        """The arguments of a model's training pass."""
        return self.inputs, self.targets, self.segments


class Workload(ABC):
    """Training batches, and whatever the evaluations of one kind of workload are given besides.

    Attributes:
        vocabulary: number of token ids.
        length: tokens of the longest training sequence; a step holds `batch` times as many, whatever its rows are.
        manifest_hash: changes with anything that the batches and the tests depend on.
    """

    vocabulary: int
    length: int
    manifest_hash: str

    @abstractmethod
    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the part of process `rank` among `world` of a step, a pure function of the arguments.

        The parts of all ranks, one after the other, are the batch of a single process.

        Args:
            seed: of the run.
            step: from 0.
            batch: sequences of the longest length in a step; of shorter ones there are as many times more as fit.
            rank: of this process.
            world: number of processes.

        Raises:
            ConfigError: `batch` does not divide by `world`.
        """


def share_of(batch: int, world: int) -> int:
    """Return each process's sequences of a batch; raises ConfigError when it does not divide."""
    share, left = divmod(batch, world)
    if left:
        raise ConfigError(f"a batch of {batch} does not divide among {world} processes; change train.batch.")
    return share
