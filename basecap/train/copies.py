"""A copy of the model in each process (DDP), and the choice between that and parts of it."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from basecap.models.language_model import LanguageModel
from basecap.train import checkpoint
from basecap.train.average import WeightAverage
from basecap.train.config import TrainConfig
from basecap.train.distributed import Processes
from basecap.train.layout import Layout, Parts, on_cpu
from basecap.train.placement import compiles_on


class Copies(Layout):
    """A copy of the model in each process; gradients are averaged over them."""

    def __init__(self, model: LanguageModel, group: Processes, *, compiles: bool):
        """Take a model on its device."""
        super().__init__(model, group)
        if compiles:
            model.compile_training()
        self.module = DistributedDataParallel(model) if group.world > 1 else model

    def without_sync(self, last: bool) -> contextlib.AbstractContextManager:
        """See `Layout`."""
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def whole(self) -> LanguageModel:
        """Return the model itself."""
        return self._model

    def local(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def total(self, norm: Tensor) -> Tensor:
        """Return the norm."""
        return norm

    def restore(self, path: Path, optimiser: torch.optim.Optimizer, average: WeightAverage | None) -> int:
        """See `Layout`."""
        return checkpoint.restore(path, self._model, optimiser, average)

    def _copied(self, partial: Path, parts: Parts) -> Callable[[], object]:
        """See `Layout`: the leading process writes all, as the others hold the same."""
        return on_cpu(self._group, partial, parts)


def lay_out(model: LanguageModel, config: TrainConfig, group: Processes) -> Layout:
    """Lay a model on its device over the processes, as `train.parallel` says."""
    compiles = compiles_on(next(model.parameters()).device, config)
    if config.parallel == "fsdp" and group.world > 1:
        from basecap.train.sharding import Shards  # half a second, which most runs need not wait

        return Shards(model, config, group, compiles=compiles)
    return Copies(model, group, compiles=compiles)
