"""RWKV's channel mixing: the feed-forward half of its blocks, which also reads the previous token."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from basecap.mixers import (
    Cache,
    Canon,
    LayerSpec,
    ParameterRecipe,
    constant,
    depth_ratios,
    mixing_share,
    orthogonal,
    scaled_orthogonal,
    shift_delta,
)


class ChannelMix(nn.Module):
    """value(relu(key(x_k))^2), times sigmoid(receptance(x_r)) up to the sixth generation.

    x_k and x_r mix each token with the one before it by a learned share per channel (RWKV-4 arXiv 2305.13048,
    RWKV-5 and RWKV-6 arXiv 2404.05892, RWKV-7 arXiv 2503.14456).
    """

    takes_lengths = True
    continues = True

    def __init__(self, generation: Literal[4, 5, 6, 7], layer: LayerSpec, inner: int):
        """Build the layer of a generation of RWKV, with a squared ReLU of width `inner`, or `layer.inner`."""
        super().__init__()
        inner = layer.inner or inner
        hidden = layer.hidden
        self.generation = generation
        self.layer = layer
        self.gated = generation < 7
        self.share_k = nn.Parameter(torch.empty(hidden))
        self.key = nn.Linear(hidden, inner, bias=False)
        self.value = nn.Linear(inner, hidden, bias=False)
        if self.gated:
            self.share_r = nn.Parameter(torch.empty(hidden))
            self.receptance = nn.Linear(hidden, hidden, bias=False)
        self.canon = Canon(inner) if "d" in layer.canon else None

    def _mix(self, x_BTD: Tensor, delta_BTD: Tensor, convolve: Callable[[Canon, Tensor], Tensor]) -> Tensor:
        key = self.key(x_BTD + delta_BTD * self.share_k)
        out = self.value(torch.relu(key if self.canon is None else convolve(self.canon, key)).square())
        if not self.gated:
            return out
        return torch.sigmoid(self.receptance(x_BTD + delta_BTD * self.share_r)) * out

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix channels; no token reads across the start of its segment (`segments` as in `Mixer.forward`)."""
        return self._mix(x_BTD, shift_delta(x_BTD, segments), lambda canon, h: canon(h, segments))

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return the empty decoding state: the last token's activations, [B, D], and that of a Canon layer."""
        tensors = {"last": self.key.weight.new_zeros(batch, self.layer.hidden)}
        return Cache(tensors=tensors if self.canon is None else {**tensors, "canon": self.canon.init_cache(batch)})

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix one more token, updating `cache`."""
        return self.prefill(x_B1D, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or one more token, updating `cache`."""
        cache.length += x_BTD.shape[1]
        delta = shift_delta(x_BTD, None, cache.tensors["last"])
        return self._mix(x_BTD, delta, lambda canon, h: canon.extend(h, cache.tensors["canon"]))

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Shares by depth; key orthogonal, value and receptance zero."""
        D, layer = self.layer.hidden, self.layer
        power = depth_ratios(layer.index, layer.depth)[1] ** {4: 1, 5: 1, 6: 3, 7: 4}[self.generation]
        zero = ParameterRecipe(init=constant(0.0))
        # The fourth generation scales tall orthogonal matrices up, later ones do not.
        key = scaled_orthogonal(1.0) if self.generation == 4 else orthogonal()
        recipes = {
            "share_k": mixing_share(D, power),
            "key.weight": ParameterRecipe(init=key),
            "value.weight": zero,
        }
        if self.gated:
            recipes |= {"share_r": mixing_share(D, power), "receptance.weight": zero}
        if self.canon is not None:
            recipes |= {f"canon.{name}": recipe for name, recipe in self.canon.recipe().items()}
        return recipes

    def flops(self, length: int) -> float:
        """Floating-point operations of a forward pass over `length` tokens (multiply-add = 2)."""
        weights = self.key.weight.numel() + self.value.weight.numel()
        canon = 0.0 if self.canon is None else self.canon.flops(length)
        return 2.0 * length * (weights + (self.receptance.weight.numel() if self.gated else 0)) + canon

    def state_bytes(self, length: int) -> int:
        """Bytes of `init_cache(1, length)` in the module's dtype."""
        canon = 0 if self.canon is None else self.canon.state_bytes()
        return self.layer.hidden * self.key.weight.element_size() + canon
