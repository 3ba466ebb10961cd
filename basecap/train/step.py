"""The arithmetic of a training step: the gradients of its micro-batches, and the update."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from basecap.data.workload import Batch
from basecap.models.language_model import LanguageModel
from basecap.train.config import TrainConfig
from basecap.train.layout import Layout
from basecap.train.optim import clip_gradients
from basecap.train.placement import DevicePlacement


class TrainingStep(ABC):
    """Gradients, then an update; between them the loop looks at the loss, so that a bad one changes no weight."""

    @abstractmethod
    def gradients(self, parts: Sequence[Batch], shares: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Set the gradients to the clipped ones of a batch; return its losses and their norm before clipping, a scalar.

        The losses [N] are the mean over the targets, and after it the model's `auxiliary_losses`.

        Both are valid until the next step.

        Args:
            parts: the micro-batches, on the device.
            shares: what the loss of each counts, scalars on the device.
        """

    @abstractmethod
    def update(self) -> None:
        """Update the weights by the gradients."""

    @abstractmethod
    def forget(self) -> None:
        """Take note that the optimiser's state is in other tensors now."""


class LaunchedStep(TrainingStep):
    """A step whose kernels Python launches, one by one."""

    def __init__(
        self,
        model: LanguageModel,
        optimiser: torch.optim.Optimizer,
        config: TrainConfig,
        layout: Layout,
        placement: DevicePlacement,
    ):
        """Take a model as it is laid out, on its device."""
        self.model, self.optimiser = model, optimiser
        self._config, self._layout, self._placement = config, layout, placement

    def gradients(self, parts: Sequence[Batch], shares: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """See `TrainingStep`."""
        self.optimiser.zero_grad(set_to_none=True)
        total = self._no_losses()
        first: tuple[Tensor, list[Tensor | None]] | None = None
        for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
            if 2 * index == len(parts) and self._adds_halves:
                first, total = (total, self._take_gradients()), self._no_losses()
            with self._layout.without_sync(last=index + 1 == len(parts)):
                total += self._backward(part, share, 1 / len(parts))
        if first is not None:
            total += first[0]
            for parameter, gradient in zip(self.model.parameters(), first[1], strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return total, self._layout.total(clip_gradients(self.model, self._config)).detach()

    @property
    def _adds_halves(self) -> bool:
        """Whether the halves of a batch are summed apart first, for the bits of two processes with one half each."""
        return self._config.deterministic and self._placement.processes.world == 1

    def _no_losses(self) -> Tensor:
        return torch.zeros(1 + len(self.model.auxiliary_losses), device=self._placement.device)

    def _take_gradients(self) -> list[Tensor | None]:
        """Return the gradients so far by parameter, and begin new ones."""
        held = [parameter.grad for parameter in self.model.parameters()]
        self.optimiser.zero_grad(set_to_none=True)
        return held

    def _backward(self, part: Batch, share: Tensor, rows: float) -> Tensor:
        """Add the gradients of a micro-batch; return its losses.

        The loss counts as its share of the targets, auxiliary losses, which are of all positions, as that of the rows.
        """
        with self._placement.autocast():
            mean, weighted, auxiliary = self._layout.module(*part.parts, auxiliary=True)
            loss = mean * share
        (loss + weighted * rows).backward()
        return torch.cat([loss.detach()[None], auxiliary * rows])

    def update(self) -> None:
        """See `TrainingStep`."""
        self.optimiser.step()

    def forget(self) -> None:
        """See `TrainingStep`."""
