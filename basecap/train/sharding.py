"""One model over several processes in parts (FSDP): each holds a part of every weight, gradient and moment.

The processes form a mesh of `replicate` x `shard`: those of a row hold one copy of the model between them, and the rows
hold the same numbers (HSDP). The weights of a block are collected before it computes, and let go of behind it.
Weights, gradients and their sums stay in float32, as with DDP, so that the losses differ by rounding alone.
"""

import contextlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from basecap.models.language_model import LanguageModel
from basecap.train import checkpoint
from basecap.train.average import WeightAverage
from basecap.train.config import TrainConfig
from basecap.train.distributed import Processes
from basecap.train.layout import Layout, Parts
from basecap.train.sharded_checkpoint import begin_shards


@cache  # each call would make new groups of processes
def _mesh(kind: str, replicate: int, shard: int) -> DeviceMesh:
    if replicate == 1:
        return init_device_mesh(kind, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicate, shard), mesh_dim_names=("replicate", "shard"))


@cache
def _storage_group() -> dist.ProcessGroup:
    """Return a group of all processes for what they say to each other about checkpoints while they train."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo"))


class Shards(Layout):
    """A part of every weight in each process."""

    def __init__(self, model: LanguageModel, config: TrainConfig, group: Processes, *, compiles: bool):
        """Replace the parameters of a model, on its device, by the parts of this process."""
        super().__init__(model, group)
        if compiles:
            model.compile_inside()
        kind = next(model.parameters()).device.type
        mesh = _mesh(kind, *config.mesh(group.world))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)  # autocast does the rest
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.module: nn.Module = model
        self._channel = _storage_group()

    def without_sync(self, last: bool) -> contextlib.AbstractContextManager:
        """See `Layout`."""
        cast(FSDPModule, self.module).set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def whole(self) -> LanguageModel:
        """Return a copy with the whole weights."""
        device = next(self._model.parameters()).device
        copy = LanguageModel(self._model.config).to(device)
        held = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        with torch.no_grad():
            for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
                source = held[name]
                tensor.copy_(source.full_tensor() if isinstance(source, DTensor) else source)
        if self._model.compiled:
            copy.compile_training(anew=False)
        return copy.train(self._model.training)

    def local(self, tensor: Tensor) -> Tensor:
        """See `Layout`."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def total(self, norm: Tensor) -> Tensor:
        """Return the norm over all processes."""
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def restore(self, path: Path, optimiser: torch.optim.Optimizer, average: WeightAverage | None) -> int:
        """See `Layout`."""
        return checkpoint.restore(path, self._model, optimiser, average, _fill)

    def _copied(self, partial: Path, parts: Parts) -> Callable[[], object]:
        """See `Layout`: each process writes its parts."""
        named = {f"{part}/{name}": tensor for part, held in parts.items() for name, tensor in held.items()}
        return begin_shards(partial, named, self._channel)


def _fill(tensor: Tensor, values: Tensor) -> None:
    """Copy the values of a whole tensor to what this process holds of it."""
    if isinstance(tensor, DTensor):
        whole = values.to(tensor.device)
        part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(part.to_local())
    else:
        tensor.copy_(values)
