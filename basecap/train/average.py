"""A running average of the weights, used by evaluations if `train.average` is set.

The weights after step s have a factor proportional to s^g in the average after step t: the power-function average of
Karras et al. (2024), "Analyzing and improving the training dynamics of diffusion models", arXiv 2312.02696, section 3.
Its width is a fixed share of the steps so far, so the average is not staler at early evaluation points than at late
ones, and the initial weights soon have no influence.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn


def exponent(width: float) -> float:
    """Return g >= 0 for which the density s^g on [0, 1] has the standard deviation `width`, at most 12^-1/2.

    This is a beta distribution, so g is the root of (g + 1) / ((g + 2)^2 (g + 3)) = width^2.

    >>> round(exponent(0.1), 2)
    6.94
    """
    inverse = width**-2
    return float(np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse]).real.max())


class WeightAverage:
    """The average of a model's parameters, in float32 and on their device."""

    def __init__(self, model: nn.Module, width: float, local: Callable[[Tensor], Tensor] = lambda tensor: tensor):
        """Start from the model's weights, which the first update replaces.

        Args:
            model: the model, on the device where it trains; its parameters must keep their memory.
            width: standard deviation of the weighting, as a share of the steps done.
            local: returns what this process holds of a parameter, in the same memory.
        """
        self._power = exponent(width) + 1
        self._local = local
        self._parameters = dict(model.named_parameters())
        self.values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step` steps, at least 1."""
        torch._foreach_lerp_(self._averages(), self._weights(), 1 - (1 - 1 / step) ** self._power)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the model; restore the model's own weights, bit for bit, at the end."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange values in place, because compiled code and the optimiser refer to the memory of the parameters."""
        for average, weight in zip(self._averages(), self._weights(), strict=True):
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)

    def _averages(self) -> list[Tensor]:
        return [self._local(value) for value in self.values.values()]

    def _weights(self) -> list[Tensor]:
        return [self._local(parameter) for parameter in self._parameters.values()]
