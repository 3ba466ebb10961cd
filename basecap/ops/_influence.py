"""Influence of each value on each output of an op, computed for blocks of heads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from basecap.ops._dispatch import without_autocast

#: Maximum number of factors in a block of several heads: 64 MiB in float32. Computing them takes up to ten times that.
BLOCK = 2**24


@dataclass(frozen=True, kw_only=True, eq=False)
class Influence:
    """The factors [B, H, T, T] in y_t = sum_{s<=t} factor_ts v_s of every head, signed, in float32 or wider.

    A channel that is mixed alone counts as a head. Factors are computed on demand, and only `whole` holds those of all
    heads.

    Attributes:
        shape: (B, H, T).
        device: where the factors are computed.
        factors: returns those of a slice of heads, [B, heads of the slice, T, T].
    """

    shape: tuple[int, int, int]
    device: torch.device
    factors: Callable[[slice], Tensor]

    @classmethod
    def of(cls, factors_BHTT: Tensor) -> "Influence":
        """Return the influence whose factors are known."""
        B, H, T, _ = factors_BHTT.shape
        return cls(shape=(B, H, T), device=factors_BHTT.device, factors=lambda heads: factors_BHTT[:, heads])

    def scaled(self, reads_BTH: Tensor | None = None, writes_BTH: Tensor | None = None) -> "Influence":
        """Return reads_t factor_ts writes_s, for outputs and values that have factors of their own."""

        def factors(heads: slice) -> Tensor:
            found = self.factors(heads)
            if reads_BTH is not None:
                found = found * reads_BTH[:, :, heads].mT[..., :, None]
            return found if writes_BTH is None else found * writes_BTH[:, :, heads].mT[..., None, :]

        return replace(self, factors=factors)

    def whole(self) -> Tensor:
        """Return the factors of all heads, [B, H, T, T]."""
        return self._block(slice(0, self.shape[1]))

    def blocks(self, elements: int = BLOCK) -> Iterator[Tensor]:
        """Yield the factors of all heads in order, as many heads at a time as have `elements` factors, at least one."""
        B, H, T = self.shape
        size = max(1, elements // max(1, B * T * T))
        for first in range(0, H, size):
            yield self._block(slice(first, min(first + size, H)))

    def mean_size(self) -> Tensor:
        """Return the mean of |factor| over the heads, [B, T, T]: what a picture shows (arXiv 2410.15678, section 3.1).

        Factors that cancel between heads, or between a head and the next layer, still count.
        """
        B, H, T = self.shape
        total = torch.zeros(B, T, T, device=self.device)
        for block in self.blocks():
            total = total + block.abs().sum(1)
        return total / H

    def _block(self, heads: slice) -> Tensor:
        # Autocast would round scores and states.
        with without_autocast(self.device):
            return self.factors(heads)


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in one dtype, float32 or wider: in half precision, rounded scores select differently."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple(x.to(dtype) for x in tensors)


def of_heads(x_BTGK: Tensor, heads: slice, total: int) -> Tensor:
    """Return for each head of a slice its group, of the G that `total` heads share, [B, T, heads of the slice, K]."""
    groups = torch.arange(heads.start, heads.stop, device=x_BTGK.device) // (total // x_BTGK.shape[2])
    return x_BTGK[:, :, groups]


def visible(length: int, segments: Tensor | None, device: torch.device) -> Tensor:
    """Return [B or 1, 1, T, T]: whether t sees s: s is in the same segment and not after t."""
    past = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    return past if segments is None else past & (segments[:, None, :, None] == segments[:, None, None, :])
