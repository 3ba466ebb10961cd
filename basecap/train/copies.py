"""A copy of the model in each process (DDP), and the choice between that and parts of it."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel
from basecap.train import checkpoint
from basecap.train.average import WeightAverage
from basecap.train.config import TrainConfig
from basecap.train.distributed import Processes
from basecap.train.layout import Layout
from basecap.train.placement import compiles_on


class Copies(Layout):
    """A copy of the model in each process; gradients are averaged over them.

    Attributes:
        aside: whether checkpoints are copied and a thread writes them: in a single process on a GPU.
    """

    def __init__(self, model: LanguageModel, group: Processes, *, compiles: bool):
        """Take a model on its device."""
        if compiles:
            model.compile_training()
        self._model, self._group = model, group
        self.aside = group.world == 1 and model.embedding.weight.is_cuda
        self._pool = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
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

    def save(
        self,
        directory: Path,
        optimiser: torch.optim.Optimizer,
        step: int,
        average: WeightAverage | None,
        before: Callable[[], None],
    ) -> None:
        """Write the checkpoint in the leading process, or begin to."""
        self.settle()

        def write() -> None:
            before()
            if not self.aside:
                checkpoint.save(directory, self._model, optimiser, step, average)
                return
            parts = {
                name: {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
                for name, tensors in checkpoint.tensors_of(self._model, optimiser, average).items()
            }
            # Made now, so that writing fails where the study's directory is moved meanwhile.
            partial = checkpoint.make_partial(directory, step)
            self._written = self._pool.submit(_write, partial, parts, step, self._model.config)

        self._group.run_on_leader(write)

    def settle(self) -> None:
        """See `Layout`."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def restore(self, path: Path, optimiser: torch.optim.Optimizer, average: WeightAverage | None) -> int:
        """See `Layout`."""
        return checkpoint.restore(path, self._model, optimiser, average)


def _write(partial: Path, parts: dict[str, dict[str, Tensor]], step: int, config: ModelConfig) -> None:
    checkpoint.write_tensors(partial, parts)
    checkpoint.complete(partial, step, config)


def lay_out(model: LanguageModel, config: TrainConfig, group: Processes) -> Layout:
    """Lay a model on its device over the processes, as `train.parallel` says."""
    compiles = compiles_on(next(model.parameters()).device, config)
    if config.parallel == "fsdp" and group.world > 1:
        from basecap.train.sharding import Shards  # half a second, which most runs need not wait

        return Shards(model, config, group, compiles=compiles)
    return Copies(model, group, compiles=compiles)
