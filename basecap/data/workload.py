"""The interface of training data: text (`PreparedData`) or a task (`TaskData`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from basecap.errors import ConfigError

if TYPE_CHECKING:  # processes that prepare text import this module and do not need torch
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of a model.

    Attributes:
        inputs: int64 [B, T].
        targets: int64 [B, T], the token to predict at each position, -1 for none.
    """

    inputs: "Tensor"
    targets: "Tensor"

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.inputs)

    @property
    def predicted(self) -> int:
        """Number of tokens to predict, of a batch on the CPU. NumPy counts them, as torch would start its threads."""
        return int(np.count_nonzero(self.targets.numpy() >= 0))

    def to(self, device: "torch.device") -> "Batch":
        """Return the batch on a device; the copy to a GPU is asynchronous."""
        return Batch(*(part.to(device, non_blocking=True) for part in self.parts))

    def split(self, rows: int) -> Iterator["Batch"]:
        """Yield the batch in parts of `rows` rows."""
        for first in range(0, len(self), rows):
            part = slice(first, first + rows)
            yield Batch(self.inputs[part], self.targets[part])

    @property
    def parts(self) -> tuple["Tensor", "Tensor"]:
        """The arguments of a training forward pass."""
        return self.inputs, self.targets


class Workload(ABC):
    """Training batches. Subclasses also hold the test data of their evaluations.

    Attributes:
        vocabulary: number of token ids.
        length: tokens of the longest training sequence; every step counts as `batch` times as many tokens.
        manifest_hash: hash of everything that the batches and tests depend on.
        pass_tokens: tokens of one pass over the training text, None for tasks, whose examples are generated.
    """

    vocabulary: int
    length: int
    manifest_hash: str
    pass_tokens: int | None = None

    @abstractmethod
    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the rows of a step for process `rank` of `world`, a pure function of the arguments.

        The rows of all ranks, concatenated, are the batch of a single process.

        Args:
            seed: seed of the run.
            step: number of the step, from 0.
            batch: sequences per step if they have the longest length; proportionally more of shorter ones.
            rank: rank of this process.
            world: number of processes.

        Raises:
            ConfigError: `batch` is not divisible by `world`.
        """


def share_of(batch: int, world: int) -> int:
    """Return the number of sequences of each process; raises ConfigError when `batch` is not divisible."""
    share, left = divmod(batch, world)
    if left:
        raise ConfigError(f"train.batch = {batch} is not divisible by the {world} processes; change it.")
    return share
