"""How a model lies over the processes that train it: `copies`, or parts of each weight (`sharding`).

Checkpoints and stored weights are written by a thread while training goes on. A checkpoint waits until all before it is
on the disk, and stored weights for those before them, so a process holds at most one checkpoint and the weights of one
evaluation point in its memory besides the model.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train import checkpoint
from basecap.train.average import WeightAverage
from basecap.train.background import BackgroundWriter
from basecap.train.distributed import Processes

#: The tensors of a checkpoint by part and name, see `checkpoint.tensors_of`.
Parts = Mapping[str, Mapping[str, Tensor]]


class Layout(ABC):
    """A model in training. All processes call each method together, except `abandon`.

    Attributes:
        module: called with a batch, returns the loss of this process's part of it.
    """

    module: nn.Module

    def __init__(self, model: LanguageModel, group: Processes):
        """Take the model and the processes that train it."""
        self._model, self._group = model, group
        self._writer = BackgroundWriter(group)
        self._keeps = False

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
    def restore(self, path: Path, optimiser: torch.optim.Optimizer, average: WeightAverage | None) -> int:
        """Load a checkpoint of any layout; return its step. Processes do not communicate. Raises CheckpointError."""

    @abstractmethod
    def _copied(self, partial: Path, parts: Parts) -> Callable[[], object]:
        """Copy tensors; return what writes this process's share of them to a directory, or waits until it is there."""

    def save(
        self, records: RunRecords, optimiser: torch.optim.Optimizer, step: int, average: WeightAverage | None
    ) -> None:
        """Copy a checkpoint and begin to write it; the rows before it are flushed to the disk first.

        Raises CheckpointError, also where an earlier one cannot be written, and LostDirectory.
        """
        self.settle()
        partial = self._begin(records, records.resume, step)
        write = self._copied(partial, checkpoint.tensors_of(self._model, optimiser, average))

        def job() -> None:
            write()
            if self._group.is_leader:
                checkpoint.complete(partial, step, self._model.config)

        self._writer.start(job)

    def keep(self, records: RunRecords, model: LanguageModel, step: int) -> None:
        """Copy the weights of a `whole` model and begin to write them; raises as `save` does."""
        if self._keeps:
            self.settle()
        self._keeps = True
        partial = self._begin(records, records.weights, step)
        write = on_cpu(self._group, partial, checkpoint.weights_of(model))

        def job() -> None:
            write()
            if self._group.is_leader:
                checkpoint.finish(partial, step, model.config)

        self._writer.start(job)

    def settle(self) -> None:
        """Wait until all is on the disk; raises CheckpointError where it could not be written."""
        self._keeps = False
        self._writer.wait()

    @property
    def failed(self) -> bool:
        """Whether this process could not write something, which the next checkpoint raises."""
        return self._writer.failed

    def abandon(self) -> BaseException | None:
        """Wait in this process alone, after an error; return why something could not be written."""
        return self._writer.failure()

    def _begin(self, records: RunRecords, directory: Path, step: int) -> Path:
        """Return a new directory, made now, so that writing fails where the study is moved meanwhile."""

        def make() -> Path:
            records.refuse_left()
            return checkpoint.make_partial(directory, step)

        return self._group.run_on_leader(make)


def on_cpu(group: Processes, partial: Path, parts: Parts) -> Callable[[], object]:
    """Copy tensors to the memory of the leading process; return what writes them there, and does nothing elsewhere."""
    copies: dict[str, dict[str, Tensor]] = {}

    def copy() -> None:
        for name, tensors in parts.items():
            copies[name] = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}

    group.run_on_leader(copy)
    return lambda: checkpoint.write_tensors(partial, copies) if group.is_leader else None
