"""The position-wise half of a block: gated (GeGLU, SwiGLU) or plain (GELU) feed-forward layers."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from basecap.mixers import Cache, LayerSpec, ParameterRecipe, Scheme, default_recipe, matrices

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

    def __init__(
        self, activation: Activation, layer: LayerSpec, inner: int, *, bias: bool = False, scheme: Scheme = "gpt-2"
    ):
        """Build the layer of width `inner`; `scheme` chooses the initialisation, see `matrices`."""
        super().__init__()
        self.scheme: Scheme = scheme
        self.activation = activation
        self.layer = layer
        self.gate = None if activation == "gelu" else nn.Linear(layer.hidden, inner, bias=bias)
        self.up = nn.Linear(layer.hidden, inner, bias=bias)
        self.down = nn.Linear(inner, layer.hidden, bias=bias)

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Map every position independently; `segments` is ignored."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BTD)))
        act = F.gelu if self.activation == "geglu" else F.silu
        return self.down(act(self.gate(x_BTD)) * self.up(x_BTD))

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return an empty cache: there is no state."""
        return Cache(tensors={})

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Map one more position."""
        cache.length += 1
        return self.forward(x_B1D)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Map a prompt."""
        cache.length = x_BTD.shape[1]
        return self.forward(x_BTD)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Matrices by the scheme, biases 0."""
        reading, writing = matrices(self.scheme, self.layer)
        own = {"up.weight": reading, "down.weight": writing}
        if self.gate is not None:
            own["gate.weight"] = reading
        return default_recipe(self) | own

    def flops(self, length: int) -> float:
        """Floating-point operations of a forward pass over `length` tokens (multiply-add = 2)."""
        widths = (layer for layer in (self.gate, self.up, self.down) if layer is not None)
        return 2.0 * length * sum(layer.weight.numel() for layer in widths)

    def state_bytes(self, length: int) -> int:
        """No state."""
        return 0
