"""How a model lies over the processes that train it: `copies`, or parts of each weight (`sharding`)."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from basecap.models.language_model import LanguageModel
from basecap.train.average import WeightAverage


class Layout(ABC):
    """A model in training. All processes call each method together.

    Attributes:
        module: called with a batch, returns the loss of this process's part of it.
    """

    module: nn.Module

    @abstractmethod
    def without_sync(self, last: bool) -> contextlib.AbstractContextManager:
        """Return a context in which a backward pass keeps its gradients local, unless it is the `last` of a step."""

    @abstractmethod
    def whole(self) -> LanguageModel:
        """Return the model with all its weights in this process, for evaluation; it may be a copy."""

    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """Return what this process holds of a parameter, in the same memory."""

    @abstractmethod
    def total(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, given what PyTorch returns as that."""

    @abstractmethod
    def save(
        self,
        directory: Path,
        optimiser: torch.optim.Optimizer,
        step: int,
        average: WeightAverage | None,
        before: Callable[[], None],
    ) -> None:
        """Write a checkpoint, or begin to; the leading process calls `before` first. Raises CheckpointError."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the last checkpoint is on disk."""

    @abstractmethod
    def restore(self, path: Path, optimiser: torch.optim.Optimizer, average: WeightAverage | None) -> int:
        """Load a checkpoint of any layout; return its step. Processes do not communicate. Raises CheckpointError."""
