"""Softmax attention that reads a mix of each token and the one before: does a token shift alone help copying?"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from basecap.mixers import Cache, LayerSpec, ParameterRecipe, mixer, mixing_share, shift_delta
from basecap.mixers.attention import Attention
from basecap.ops import Influence


@mixer(
    "shifted",
    backbone="transformer++",
    paper="arXiv 2305.13048 (RWKV, token shift), here before softmax attention",
    summary="transformer++ whose attention reads x_t + share (x_(t-1) - x_t)",
)
class Shifted(Attention):
    """Attention over x_t + share * (x_(t-1) - x_t), with a share per channel that starts evenly spread from 1 to 0."""

    class Config(Attention.Config):
        """Options of softmax attention."""

    sizes: ClassVar = Attention.sizes

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.share = nn.Parameter(torch.empty(layer.hidden))

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Shift, then attend."""
        return super().forward(self._mix(x_BTD, segments), segments)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Those of attention and the last token, [B, D]."""
        cache = super().init_cache(batch, max_length)
        cache.tensors["last"] = self.share.new_zeros(
            batch, self.layer.hidden, dtype=torch.promote_types(self.share.dtype, torch.float32)
        )
        return cache

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Shift by the cached token, then attend."""
        return super().step(self._mix(x_B1D, None, cache.tensors["last"]), cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Shift, keep the last token, then attend over the prompt."""
        return super().prefill(self._mix(x_BTD, None, cache.tensors["last"]), cache)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the attention distribution over the mixed tokens."""
        return super().influence(self._mix(x_BTD, None))

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and outputs of attention over the mixed tokens."""
        return super().mixed(self._mix(x_BTD, None))

    def _mix(self, x_BTD: Tensor, segments: Tensor | None, last_BD: Tensor | None = None) -> Tensor:
        return x_BTD + self.share * shift_delta(x_BTD, segments, last_BD)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """That of attention; the shares are evenly spread over the channels, as in RWKV."""
        return {**super().recipe(), "share": mixing_share(self.layer.hidden, 1.0)}

    def state_bytes(self, length: int) -> int:
        """Keys and values, and the last token."""
        return super().state_bytes(length) + 4 * self.layer.hidden
