"""Communication between the processes that train one model, one per device."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from basecap.errors import BasecapError, TrainingError, describe_error
from basecap.system.environment import refuse_lone_tasks

T = TypeVar("T")

#: How long a process waits for the others. The leader may prepare text for hours, and the defaults (10 minutes for
#: NCCL, 30 for gloo) would end the study. If a process dies, `torchrun` ends the others.
COLLECTIVE_TIMEOUT = timedelta(days=7)


class SharedError(TrainingError):
    """An error of one process, raised in all of them; its cause is only set in the process that failed."""


def error_sentence(error: BaseException) -> str:
    """Return an error as one line, with its class unless it is a BasecapError."""
    return str(error) if isinstance(error, BasecapError) else describe_error(error)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The rank of this process among those that train one model."""

    rank: int = 0
    world: int = 1

    @property
    def is_leader(self) -> bool:
        """Whether this process writes the records."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        if self.world == 1:
            return value
        dist.all_reduce(value)
        return value / self.world

    def run_on_all(self, action: Callable[[], T]) -> list[T]:
        """Call `action` in every process, wait for all, and return the results by rank.

        Args:
            action: must not communicate with other processes, and should return something small.

        Raises:
            SharedError: `action` failed in one of several processes. All raise it, so that none waits forever.
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
            failure = None  # breaks the reference cycle through the traceback, which would keep tensors alive
        return [found for _, found in outcomes]

    def run_on_leader(self, action: Callable[[], T]) -> T:
        """Call `action` in the leader while the others wait; return its (small) result in all processes.

        Raises:
            SharedError: `action` failed and there are several processes; all raise it.
        """
        return cast(T, self.run_on_all(action if self.is_leader else lambda: None)[0])


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """Join the process group if `torchrun` started this process; yields the rank of this process.

    Raises ConfigError in one of several tasks of `srun` without `torchrun`.

    A process that fails does not destroy the group, because that would wait for processes that wait for this one. It
    exits, and `torchrun` stops the others.
    """
    refuse_lone_tasks()
    if not dist.is_torchelastic_launched():
        yield Processes()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    yield Processes(rank=dist.get_rank(), world=dist.get_world_size())
    dist.destroy_process_group()
