"""Shared by the mixers whose state is a decaying sum of keys times values: the recurrence and its decoding state."""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from basecap.mixers._contract import Cache, Mixer
from basecap.ops import Influence
from basecap.ops.ssd import influence as ssd_influence
from basecap.ops.ssd import ssd
from basecap.ops.wkv6 import influence as wkv6_influence
from basecap.ops.wkv6 import wkv6

#: Queries, keys [B, T, H, K], values [B, T, H, V], log decays.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]

#: Epsilon of the norm of the output.
EPS = 1e-5

#: How it differs from fla's models, which give their layers that of the model; HGRN-2's takes no notice of it.
OWN_EPS = (
    "The norm of each head's output has the epsilon of fla's layer, 1e-5, not of its model, 1e-6, with which heads "
    "that find next to nothing amplify rounding errors."
)


def linear_memory(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T, o_t = q_t^T S_t; decays [B, T, H] or [B, T, H, K].

    Returns o [B, T, H, V] and the final state [B, H, K, V].
    """
    if log_decay.dim() == 3:
        return ssd(q, k, v, log_decay, state_BHKV=state, segments=segments)
    # RWKV-6 reads before it writes: the decayed query finds what is older, and a token reads itself apart.
    before = (q * log_decay.exp()).to(q.dtype)
    o, last = wkv6(before, k, v, log_decay, q.new_zeros(q.shape[2:]), state_BHKV=state, segments=segments)
    own = (q * k).sum(-1, keepdim=True, dtype=torch.promote_types(q.dtype, torch.float32))
    return o + (own * v).to(o.dtype), last


def influence(q: Tensor, k: Tensor, log_decay: Tensor) -> Influence:
    """Return q_t . (k_s prod_{s<r<=t} decay_r), the factor in front of v_s in o_t of `linear_memory`."""
    if log_decay.dim() == 3:
        return ssd_influence(q, k, log_decay)
    older = wkv6_influence(q * log_decay.exp(), k, log_decay, q.new_zeros(q.shape[2:]))

    def factors(heads: slice) -> Tensor:
        found = older.factors(heads)
        own = (q[:, :, heads] * k[:, :, heads]).to(found.dtype).sum(-1).mT
        return found + torch.diag_embed(own)

    return replace(older, factors=factors)


class LinearMemory(Mixer):
    """A mixer of one decaying memory per head; subclasses say what is written and what follows the reading.

    The constructor of a subclass sets `heads`, `key_dim` and `value_dim`.
    """

    takes_lengths: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    heads: int
    key_dim: int
    value_dim: int

    @abstractmethod
    def inputs(self, x_BTD: Tensor, start: int | Tensor, segments: Tensor | None) -> Inputs:
        """Return what `linear_memory` takes: q, k, v and log decays; positions count from `start`, or in `segments`."""

    @abstractmethod
    def finish(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return [B, T, D] for what the heads read."""

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        inputs = self.inputs(x_BTD, 0, segments)
        return self.finish(linear_memory(*inputs, None, segments)[0], x_BTD)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The memory [B, H, K, V], at least float32; constant in `max_length`."""
        like = next(self.parameters())
        dtype = torch.promote_types(like.dtype, torch.float32)
        return Cache(tensors={"state": like.new_zeros(batch, self.heads, self.key_dim, self.value_dim, dtype=dtype)})

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token."""
        return self.prefill(x_B1D, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, chunk by chunk and keep its final state."""
        inputs = self.inputs(x_BTD, cache.start, None)
        o, state = linear_memory(*inputs, cache.tensors["state"], None)
        cache.tensors["state"].copy_(state)
        cache.length += x_BTD.shape[1]
        return self.finish(o, x_BTD)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the factor q_t . (k_s prod_{s<r<=t} decay_r) in front of v_s."""
        q, k, _, log_decay = self.inputs(x_BTD, 0, None)
        return influence(q, k, log_decay)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and what the memory reads."""
        inputs = self.inputs(x_BTD, 0, None)
        return inputs[2], linear_memory(*inputs, None, None)[0]

    def flops(self, length: int) -> float:
        """Products with weights, and the recurrence (decay 1, write 2, read 2: 5 K V per head and token)."""
        weights = sum(parameter.numel() for parameter in self.parameters() if parameter.dim() == 2)
        return length * (2.0 * weights + 5.0 * self.heads * self.key_dim * self.value_dim)

    def state_bytes(self, length: int) -> int:
        """The memory, whatever the length."""
        itemsize = max(next(self.parameters()).element_size(), 4)
        return self.heads * self.key_dim * self.value_dim * itemsize
