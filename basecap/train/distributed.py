"""The processes that train one model together, one per device."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from basecap.errors import BasecapError, TrainingError, describe_error

T = TypeVar("T")

#: How long a process waits for the others. The leader prepares text and measures what is not shared, for hours; the
#: defaults (10 minutes for NCCL, 30 for gloo) would end the study. Where a process dies, `torchrun` ends the others.
COLLECTIVE_TIMEOUT = timedelta(days=7)


class SharedError(TrainingError):
    """What failed in one process, raised alike in all of them; its cause is known where it failed."""


def error_sentence(error: Exception) -> str:
    """Return an error in one line, with its class unless it is a BasecapError."""
    return str(error) if isinstance(error, BasecapError) else describe_error(error)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process's rank among those that train one model."""

    rank: int = 0
    world: int = 1

    @property
    def is_leader(self) -> bool:
        """Whether this process writes the records."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model` with its gradients averaged over the processes."""
        return DistributedDataParallel(model) if self.world > 1 else model

    def without_sync(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager:
        """Return a context in which a backward pass keeps its gradients local, unless it is the `last` of a step."""
        if isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
        return contextlib.nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        if self.world == 1:
            return value
        dist.all_reduce(value)
        return value / self.world

    def run_on_all(self, action: Callable[[], T]) -> list[T]:
        """Call `action` in every process, wait for all, and return the results by rank.

        Args:
            action: communicates with no other process and returns something small.

        Raises:
            SharedError: `action` failed in one of several processes. All raise it, so that none waits for another.
        """
        if self.world == 1:
            return [action()]
        failure: Exception | None = None
        try:
            outcome: tuple[str | None, T | None] = (None, action())
        except Exception as error:
            failure, outcome = error, (error_sentence(error), None)
        outcomes: list = [None] * self.world
        dist.all_gather_object(outcomes, outcome)
        try:
            for failed, _ in outcomes:
                if failed is not None:
                    raise SharedError(failed) from failure
        finally:
            failure = None  # its trace holds this frame: the circle would keep the tensors of a failed run alive
        return [found for _, found in outcomes]

    def run_on_leader(self, action: Callable[[], T]) -> T:
        """Call `action` in the leading process while the others wait; return its result, something small, everywhere.

        Raises:
            SharedError: it failed in one of several processes; all raise it.
        """
        return cast(T, self.run_on_all(action if self.is_leader else lambda: None)[0])


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """Join the group that `torchrun` started, if it started this process; yields this process's rank in it.

    A process that fails does not destroy the group: that would wait for processes that wait for this one. It exits,
    and `torchrun` stops the others.
    """
    if not dist.is_torchelastic_launched():
        yield Processes()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    yield Processes(rank=dist.get_rank(), world=dist.get_world_size())
    dist.destroy_process_group()
