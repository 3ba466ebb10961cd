"""A base class for mixers that have no decoding of their own yet."""

import torch
from torch import Tensor

from basecap.mixers._contract import Cache, Mixer, MixerConfig
from basecap.mixers._parts import remember
from basecap.mixers._recipes import LayerSpec


class ForwardOnly(Mixer):
    """A mixer that decodes by running `forward` over all inputs so far, which its cache holds.

    Right for every causal mixer without `takes_shared`, and as slow as a forward pass for each token.
    """

    #: Empty, with the dtype and device of the module, which may have no parameters.
    _like: Tensor

    def __init__(self, config: MixerConfig, layer: LayerSpec):
        super().__init__(config, layer)
        self.register_buffer("_like", torch.empty(0), persistent=False)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return room for the inputs, [batch, max_length, D]."""
        inputs = self._like.new_zeros(batch, max_length, self.layer.hidden)
        return Cache(tensors={"inputs": inputs}, by_position=True)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix the next token."""
        return self.prefill(x_B1D, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix further tokens, all at once."""
        start = cache.length
        remember(cache, {"inputs": x_BTD})
        # A copy: the next token is written in place, and forward may keep views.
        inputs_BTD = cache.tensors["inputs"][:, : cache.length].to(x_BTD.dtype, copy=True)
        y_BTD: Tensor = self(inputs_BTD)
        return y_BTD[:, start:]

    def state_bytes(self, length: int) -> int:
        """All inputs so far."""
        return length * self.layer.hidden * self._like.element_size()
