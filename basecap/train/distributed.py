"""The processes that train one model together, one per device."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process's place among those that train one model."""

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes the records."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model` with its gradients averaged over the processes."""
        return DistributedDataParallel(model) if self.world > 1 else model

    def unsynchronised(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager:
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

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.world > 1:
            dist.barrier()


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """Join the group that `torchrun` started, if it started this process; yields the place in it."""
    if not dist.is_torchelastic_launched():
        yield Processes()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(rank=dist.get_rank(), world=dist.get_world_size())
    finally:
        dist.destroy_process_group()
