"""The proof of causality, one for single mixers (`basecap check`) and for whole models (`basecap run`).

A probe holds two inputs that differ only where the outputs of interest must not depend on them. Two things are
measured: how far those outputs move from one input to the other, and their gradient with respect to those places.
Who measures decides what is excused as rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Maps activations [B, T, D] and segment ids [B, T], or None, to outputs [B, T, D].
Mix = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Two inputs that agree on `own`; outputs there may depend on inputs there alone.

    Attributes:
        x: activations [B, T, D].
        changed: the same where `own` is true, others elsewhere.
        own: bool [B, T].
        weight: of the outputs [B, T, D] in the sum whose gradient is taken.
        segments: int64 [B, T], or None where each row is one sequence.
    """

    x: Tensor
    changed: Tensor
    own: Tensor
    weight: Tensor
    segments: Tensor | None = None

    def movement(self, mix: Mix, y: Tensor | None = None) -> tuple[Tensor, float]:
        """Return how far outputs move, zero where they may, and the root mean square of all outputs.

        Args:
            mix: what is proved.
            y: its output for `x`, where that is known.
        """
        before = (mix(self.x, self.segments) if y is None else y).detach().double()
        after = mix(self.changed, self.segments).detach().double()
        return (after - before).where(self.own[..., None], 0), _root_mean_square(before)

    def gradient(self, mix: Mix) -> tuple[Tensor, float]:
        """Return the gradient of outputs on `own` elsewhere, zero on `own`, and its root mean square there."""
        x = self.x.detach().clone().requires_grad_()
        with torch.enable_grad():
            y = mix(x, self.segments)
            loss = (y * self.weight.to(y.dtype)).where(self.own[..., None], 0).sum()
            (grad,) = torch.autograd.grad(loss, x)
        grad = grad.double()
        return grad.where(~self.own[..., None], 0), _root_mean_square(grad[self.own])

    def moved(self, draw: Callable[[], Tensor], share: float) -> "Probe":
        """Return the probe with inputs and weights moved by `share` of themselves, as signs that `draw` returns say."""
        factor, weight = 1 + share * draw(), self.weight * (1 + share * draw())
        return replace(self, x=self.x * factor, changed=self.changed * factor, weight=weight)


def _root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def future(x: Tensor, other: Tensor, weight: Tensor, cuts: Sequence[int]) -> Probe:
    """Return the probe whose row r takes its inputs from position `cuts[r]` on from `other` [B, T, D]."""
    own = torch.arange(x.shape[1], device=x.device) < torch.tensor(cuts, device=x.device)[:, None]
    return Probe(x=x, changed=torch.where(own[..., None], x, other), own=own, weight=weight)


def documents(x: Tensor, other: Tensor, weight: Tensor, segments: Tensor, held: Sequence[int]) -> Probe:
    """Return the probe whose row r takes all inputs but those of segment `held[r]` from `other` [B, T, D]."""
    own = segments == torch.tensor(held, device=x.device)[:, None]
    return Probe(x=x, changed=torch.where(own[..., None], x, other), own=own, weight=weight, segments=segments)


def choose_cuts(length: int) -> list[int]:
    """Return where a sequence is cut in two, the most telling place first: between blocks, within them, at both ends.

    A leak within blocks of any size shows at a cut inside one; a leak over the edge of blocks, whose size is mostly a
    power of two, at a multiple of it; one of a block's first position just after that.
    """
    power = 1 << max(0, (length - 1).bit_length() - 1)  # the largest one below the length
    later = power + power // 2
    wanted = (length // 3, later, length - 1, power, power + 1, later + 1, 1)
    return [cut for cut in dict.fromkeys(wanted) if 0 < cut < length]
