"""The measurement of leaks, for single mixers (`basecap check`) and for whole models (`basecap run`).

A probe holds two inputs that differ only where the outputs of interest must not depend on them. Two things are
measured: how much those outputs change from one input to the other, and their gradient with respect to those
positions. The caller decides how much of it may be rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from basecap.testing._harness import root_mean_square

#: Maps activations [B, T, D] and segment ids [B, T], or None, to outputs [B, T, D].
Mix = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Two inputs that agree on `own`; outputs there may depend on inputs there only.

    Attributes:
        x: activations [B, T, D].
        changed: equal to x where `own` is true, different elsewhere.
        own: bool [B, T].
        weight: of the outputs [B, T, D] in the sum whose gradient is taken.
        segments: int64 [B, T], or None where each row is one sequence.
        later: those that go with `changed`, if they differ; equal to `segments` on `own`.
    """

    x: Tensor
    changed: Tensor
    own: Tensor
    weight: Tensor
    segments: Tensor | None = None
    later: Tensor | None = None

    def movement(self, mix: Mix, y: Tensor | None = None) -> tuple[Tensor, float]:
        """Return the change of the outputs on `own`, zero elsewhere, and the root mean square of all outputs.

        Args:
            mix: the function to test.
            y: its output for `x`, if known.
        """
        before = (mix(self.x, self.segments) if y is None else y).detach().double()
        after = mix(self.changed, self.segments if self.later is None else self.later).detach().double()
        return (after - before).where(self.own[..., None], 0), root_mean_square(before)

    def gradient(self, mix: Mix) -> tuple[Tensor, float]:
        """Return the gradient of outputs on `own` with respect to x, zero on `own`, and its root mean square there."""
        x = self.x.detach().clone().requires_grad_()
        with torch.enable_grad():
            y = mix(x, self.segments)
            loss = (y * self.weight.to(y.dtype)).where(self.own[..., None], 0).sum()
            (grad,) = torch.autograd.grad(loss, x)
        grad = grad.double()
        return grad.where(~self.own[..., None], 0), root_mean_square(grad[self.own])

    def moved(self, draw: Callable[[], Tensor], share: float) -> "Probe":
        """Return the probe with each input and weight changed by `share` of itself, up or down as `draw` returns."""
        factor, weight = 1 + share * draw(), self.weight * (1 + share * draw())
        return replace(self, x=self.x * factor, changed=self.changed * factor, weight=weight)


def future(x: Tensor, other: Tensor, weight: Tensor, cuts: Sequence[int]) -> Probe:
    """Return the probe whose row r takes its inputs from position `cuts[r]` on from `other` [B, T, D]."""
    own = torch.arange(x.shape[1], device=x.device) < torch.tensor(cuts, device=x.device)[:, None]
    return Probe(x=x, changed=torch.where(own[..., None], x, other), own=own, weight=weight)


def packed(x: Tensor, other: Tensor, weight: Tensor, own: Tensor) -> Probe:
    """Return the probe of documents that begin with each run of `own`, bool [B, T], and take the rest from `other`.

    What follows a run is of the same document, and after the change of a document of its own.
    """
    segments = 2 * (own & ~own.roll(1, 1)).cumsum(1)
    changed = torch.where(own[..., None], x, other)
    return Probe(x=x, changed=changed, own=own, weight=weight, segments=segments, later=segments + ~own)


def runs(length: int, period: int) -> Tensor:
    """Return bool [period, T], true except in short gaps, with a run that begins and one that ends at every position.

    Row r has its gaps `period` positions apart, one position earlier than row r - 1.
    """
    position = torch.arange(length) + torch.arange(period)[:, None]
    return position % period > period // 32


def choose_cuts(length: int) -> list[int]:
    """Return the positions to cut a sequence at, most informative first: between blocks, within them, at both ends.

    A leak within blocks shows at a cut inside one; a leak across the edge of blocks, whose size is usually a power of
    two, at a multiple of it; a leak of a block's first position just after that.
    """
    power = 1 << max(0, (length - 1).bit_length() - 1)  # the largest one below the length
    later = power + power // 2
    wanted = (length // 3, later, length - 1, power, power + 1, later + 1, 1)
    return [cut for cut in dict.fromkeys(wanted) if 0 < cut < length]
