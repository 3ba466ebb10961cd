"""Shared by the delta-rule mixers: projections, short convolution, the memory and the layer around it."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from basecap.mixers._contract import Cache, Mixer, divide
from basecap.mixers._parts import ShortConvolution, rms_norm
from basecap.mixers._recipes import ParameterRecipe, default_recipe, normal
from basecap.mixers._state_space import convolve, convolve_step
from basecap.ops import Influence
from basecap.ops.channel_delta_rule import (
    channel_delta_rule,
    channel_influence,
    decoupled_delta_rule,
    decoupled_influence,
)
from basecap.ops.delta_rule import delta_rule, influence

#: The library of the authors of DeltaNet: repository and commit.
REPOSITORY = "fla-org/flash-linear-attention@bc3b101dcb713ddc5bd8924b66754eb68b5ccf89"

#: Epsilon of the norm of each head's output: fla's models give their layers that of the model, not the layers' 1e-5.
EPS = 1e-6

#: How the variants without short convolution differ from fla.
SHRUNK = (
    "Without convolutions the output projection is shrunk with depth: at fla's std 0.02 the blocks amplify gradients, "
    "74-fold over 48 blocks of DeltaNet and 97-fold of Gated DeltaNet; fla advises against this option.",
)


class DeltaMemory(nn.Module):
    """The delta rule over convolved queries, keys and values of the input (arXiv 2406.06484, section 3.5).

    Queries and keys have Euclidean norm 1; writing strengths are sigmoids, or twice that. The caller passes the log
    decays: None, one for each head [B, T, H], or one for each channel of the keys [B, T, H, K].
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int | None,
        strongest: float = 1.0,
        by_channel: bool = False,
        key_heads: int | None = None,
    ):
        """Build the projections; `conv_width` None: no short convolution; writing strengths are below `strongest`.

        `key_heads`: so many heads of queries and keys, each shared by as many of the `heads`; None: all have their own.

        `by_channel`: strengths beta are for erasing, one for each channel of the keys, and each channel of the values
        has one of its own for writing (arXiv 2605.22791).
        """
        super().__init__()
        self.strongest = strongest
        self.heads, self.key_dim, self.value_dim = heads, key_dim, value_dim
        self.key_heads = key_heads or heads
        divide(heads, self.key_heads, "heads by key_heads")
        channels = 2 * self.key_heads * key_dim + heads * value_dim
        self.qkv = nn.Linear(hidden, channels, bias=False)
        self.beta = nn.Linear(hidden, heads * key_dim if by_channel else heads, bias=False)
        self.write = nn.Linear(hidden, heads * value_dim, bias=False) if by_channel else None
        self.conv = None
        if conv_width is not None:
            self.conv = ShortConvolution(channels, conv_width, bias=False, activation="silu")

    def inputs(
        self, x_BTD: Tensor, projected: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k [B, T, H, K], v [B, T, H, V] and beta [B, T, H]; `projected` is the convolved qkv, if known.

        By channel beta is [B, T, H, K] and v comes times its writing strengths.
        """
        mixed = convolve(self.conv, self.qkv(x_BTD), segments) if projected is None else projected
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.heads * self.value_dim], dim=-1)
        beta = self.beta(x_BTD).to(torch.promote_types(x_BTD.dtype, torch.float32)).sigmoid() * self.strongest
        if self.write is not None:
            beta = beta.unflatten(-1, (self.heads, self.key_dim))
            v = v * self.write(x_BTD).sigmoid()
        q, k = self._unit(q) * self.key_dim**-0.5, self._unit(k)
        return q, k, v.unflatten(-1, (self.heads, self.value_dim)), beta

    def forward(self, x_BTD: Tensor, log_decay: Tensor | None, segments: Tensor | None = None) -> Tensor:
        """Return what the memory reads at every position [B, T, H, V]."""
        return self._recur(self.inputs(x_BTD, segments=segments), log_decay, segments=segments)[0]

    def init_cache(self, batch: int) -> Cache:
        """The memory [B, H, K, V], at least float32, and the convolution's last inputs."""
        weight = self.qkv.weight
        state = weight.new_zeros(batch, self.heads, self.key_dim, self.value_dim)
        tensors = {"state": state.to(torch.promote_types(weight.dtype, torch.float32))}
        if self.conv is not None:
            tensors["conv"] = self.conv.init_cache(batch)
        return Cache(tensors=tensors)

    def step(self, x_B1D: Tensor, log_decay: Tensor | None, cache: Cache) -> Tensor:
        """Read at one more token [B, 1, H, V]."""
        return self._advance(x_B1D, convolve_step(self.conv, self.qkv(x_B1D), cache), log_decay, cache)

    def prefill(self, x_BTD: Tensor, log_decay: Tensor | None, cache: Cache) -> Tensor:
        """Read at every token of a prompt, or more of it, [B, T, H, V], chunk by chunk."""
        projected = self.qkv(x_BTD)
        if self.conv is not None and cache.length:
            return self._advance(x_BTD, self.conv.further(projected, cache.tensors["conv"]), log_decay, cache)
        if self.conv is not None:
            self.conv.fill(projected, cache.tensors["conv"])
        return self._advance(x_BTD, convolve(self.conv, projected, None), log_decay, cache)

    def influence(self, x_BTD: Tensor, log_decay: Tensor | None) -> Influence:
        """Return the factor in front of each convolved value."""
        q, k, _, beta = self.inputs(x_BTD)
        if log_decay is not None and log_decay.dim() == 4:
            return (channel_influence if self.write is None else decoupled_influence)(q, k, beta, log_decay)
        return influence(q, k, beta, log_decay)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Everything normal(0.02), also the convolution: fla's models initialise every nn.Conv1d like a projection."""
        conv = {} if self.conv is None else self.conv.recipe(normal(0.02))
        return default_recipe(self) | {f"conv.{name}": recipe for name, recipe in conv.items()}

    def flops(self, length: int) -> float:
        """Projections, convolution and the recurrence (recall, correct, read out: 6 K V per head and token)."""
        weights = sum(parameter.numel() for parameter in self.parameters())
        return length * (2.0 * weights + 6.0 * self.heads * self.key_dim * self.value_dim)

    def state_bytes(self) -> int:
        """Bytes of the memory and of the convolution's last inputs."""
        itemsize = self.qkv.weight.element_size()
        conv = 0 if self.conv is None else (self.conv.width - 1) * self.conv.weight.shape[0] * itemsize
        return self.heads * self.key_dim * self.value_dim * max(itemsize, 4) + conv

    def _recur(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
        log_decay: Tensor | None,
        state: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if log_decay is not None and log_decay.dim() == 4:
            run = channel_delta_rule if self.write is None else decoupled_delta_rule
            return run(*inputs, log_decay, state_BHKV=state, segments=segments)
        return delta_rule(*inputs, log_decay, state_BHKV=state, segments=segments)

    def _advance(self, x: Tensor, projected: Tensor, log_decay: Tensor | None, cache: Cache) -> Tensor:
        o, state = self._recur(self.inputs(x, projected), log_decay, cache.tensors["state"])
        cache.tensors["state"].copy_(state)
        cache.length += x.shape[1]
        return o

    def _unit(self, x: Tensor) -> Tensor:
        """Split into heads of Euclidean norm 1, which is root mean square 1 / sqrt(K): [B, T, H, K]."""
        heads = x.unflatten(-1, (self.key_heads, self.key_dim))
        unit = rms_norm(heads, eps=1e-6 / self.key_dim) * self.key_dim**-0.5
        return unit if self.key_heads == self.heads else unit.repeat_interleave(self.heads // self.key_heads, dim=2)


class DeltaMixer(Mixer):
    """A mixer around a `DeltaMemory`; subclasses build `memory` and say how it decays and what follows the reading."""

    takes_lengths: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    memory: DeltaMemory

    @abstractmethod
    def log_decay(self, x_BTD: Tensor) -> Tensor | None:
        """Return the log decays: None, [B, T, H] or [B, T, H, K], in float32 or wider."""

    @abstractmethod
    def finish(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return [B, T, D] for what the heads read."""

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix; see `Mixer.forward`."""
        return self.finish(self.memory(x_BTD, self.log_decay(x_BTD), segments), x_BTD)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The memory and the convolution's last inputs, constant in `max_length`."""
        return self.memory.init_cache(batch)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token."""
        return self.finish(self.memory.step(x_B1D, self.log_decay(x_B1D), cache), x_B1D)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, chunk by chunk and keep its final state."""
        return self.finish(self.memory.prefill(x_BTD, self.log_decay(x_BTD), cache), x_BTD)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the factor q_t (prod_{s<r<=t} (I - beta_r k_r k_r^T) diag(a_r)) beta_s k_s before each value."""
        return self.memory.influence(x_BTD, self.log_decay(x_BTD))

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolved values and what the memory reads."""
        return self.memory.inputs(x_BTD)[2], self.memory(x_BTD, self.log_decay(x_BTD))

    def state_bytes(self, length: int) -> int:
        """The memory and the convolution's last inputs, whatever the length."""
        return self.memory.state_bytes()
