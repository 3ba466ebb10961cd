"""The position-wise half of a block: gated (GeGLU, SwiGLU) or plain (GELU) feed-forward layers."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basecap.mixers import Cache, Canon, LayerSpec, ParameterRecipe, Scheme, default_recipe, matrices

Activation = Literal["geglu", "swiglu", "gelu"]


def gated_inner(hidden: int) -> int:
    """Return 8/3 hidden, rounded up to a multiple of 64: as many parameters as a plain layer of width 4 hidden."""
    return _thirds(8, hidden)


def narrow_inner(hidden: int) -> int:
    """Return 7/3 hidden, rounded up to a multiple of 64: a matrix [hidden, hidden] less than `gated_inner`."""
    return _thirds(7, hidden)


def _thirds(parts: int, hidden: int) -> int:
    return -(-parts * hidden // (3 * 64)) * 64


class FeedForward(nn.Module):
    """`down(act(up(x)))`, or `down(act(gate(x)) * up(x))` when gated (arXiv 2002.05202, eq. 6)."""

    takes_lengths = True
    continues = True

    def __init__(
        self, activation: Activation, layer: LayerSpec, inner: int, *, bias: bool = False, scheme: Scheme = "gpt-2"
    ):
        """Build the layer of width `inner`, or `layer.inner`; `scheme` chooses the initialisation, see `matrices`."""
        super().__init__()
        inner = layer.inner or inner
        self.scheme: Scheme = scheme
        self.activation = activation
        self.layer = layer
        self.gate = None if activation == "gelu" else nn.Linear(layer.hidden, inner, bias=bias)
        self.up = nn.Linear(layer.hidden, inner, bias=bias)
        self.down = nn.Linear(inner, layer.hidden, bias=bias)
        inputs = inner if self.gate is None else 2 * inner
        self.canon = Canon(inputs) if "d" in layer.canon else None

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Map every position; a Canon layer before the activation reads earlier ones of the same segment."""
        return self._map(x_BTD, lambda canon, h: canon(h, segments))

    def _map(self, x_BTD: Tensor, convolve: Callable[[Canon, Tensor], Tensor]) -> Tensor:
        inputs = [layer(x_BTD) for layer in (self.gate, self.up) if layer is not None]
        if self.canon is not None:
            inputs = [*convolve(self.canon, torch.cat(inputs, dim=-1)).chunk(len(inputs), dim=-1)]
        if self.gate is None:
            return self.down(F.gelu(inputs[0]))
        act = F.gelu if self.activation == "geglu" else F.silu
        return self.down(act(inputs[0]) * inputs[1])

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return the empty decoding state: that of a Canon layer, if there is one."""
        cache = Cache(tensors={}, by_position=True)
        if self.canon is not None:
            cache.keep_last("canon", self.canon.init_cache(batch))
        return cache

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Map one more position."""
        cache.length += 1
        return self._map(x_B1D, lambda canon, h: canon.extend(h, cache.tensors["canon"]))

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Map a prompt."""
        cache.length += x_BTD.shape[1]
        return self._map(x_BTD, lambda canon, h: canon.extend(h, cache.tensors["canon"]))

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Matrices by the scheme, biases 0."""
        reading, writing = matrices(self.scheme, self.layer)
        own = {"up.weight": reading, "down.weight": writing}
        if self.gate is not None:
            own["gate.weight"] = reading
        if self.canon is not None:
            own |= {f"canon.{name}": recipe for name, recipe in self.canon.recipe().items()}
        return default_recipe(self) | own

    def flops(self, length: int) -> float:
        """Floating-point operations of a forward pass over `length` tokens (multiply-add = 2)."""
        widths = (layer for layer in (self.gate, self.up, self.down) if layer is not None)
        canon = 0.0 if self.canon is None else self.canon.flops(length)
        return 2.0 * length * sum(layer.weight.numel() for layer in widths) + canon

    def state_bytes(self, length: int) -> int:
        """That of a Canon layer, whatever the length."""
        return 0 if self.canon is None else self.canon.state_bytes()
