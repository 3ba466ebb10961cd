"""One residual block for every architecture: norm and mixer, then (where the family has one) norm and feed-forward."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from basecap.mixers._contract import Cache, Mixer, ParameterRecipe, default_recipe
from basecap.models.backbones._contract import Backbone

Half = Callable[[Tensor], Tensor]


@dataclass(kw_only=True)
class BlockCache:
    """The decoding state of one block: its mixer's and its feed-forward layer's."""

    mixer: Cache
    feed_forward: Cache | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.mixer.nbytes + (self.feed_forward.nbytes if self.feed_forward else 0)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)); or both from the same x when the family is parallel."""

    def __init__(self, backbone: Backbone, mixer: Mixer):
        super().__init__()
        self.parallel = backbone.parallel
        self.mixer_norm = backbone.make_norm(mixer.layer.hidden)
        self.mixer = mixer
        self.feed_forward_norm = self.feed_forward = None
        if backbone.feed_forward is not None:
            self.feed_forward_norm = backbone.make_norm(mixer.layer.hidden)
            self.feed_forward = backbone.feed_forward(mixer.layer)

    def forward(self, x_BTD: Tensor, segments: Tensor | None, shared: dict[str, Tensor]) -> Tensor:
        """Transform a batch; `segments` and `shared` as in `Mixer`."""
        extra = (shared,) if self.mixer.takes_shared else ()
        return self._residual(
            x_BTD, lambda h: self.mixer(h, segments, *extra), lambda h: self.feed_forward(h, segments)
        )

    def step(self, x_B1D: Tensor, cache: BlockCache, shared: dict[str, Tensor]) -> Tensor:
        """Transform one more token, updating `cache`."""
        extra = (shared,) if self.mixer.takes_shared else ()
        return self._residual(
            x_B1D,
            lambda h: self.mixer.step(h, cache.mixer, *extra),
            lambda h: self.feed_forward.step(h, cache.feed_forward),
        )

    def prefill(self, x_BTD: Tensor, cache: BlockCache, shared: dict[str, Tensor]) -> Tensor:
        """Transform a prompt, filling the empty `cache`."""
        extra = (shared,) if self.mixer.takes_shared else ()
        return self._residual(
            x_BTD,
            lambda h: self.mixer.prefill(h, cache.mixer, *extra),
            lambda h: self.feed_forward.prefill(h, cache.feed_forward),
        )

    def init_cache(self, batch: int, max_length: int) -> BlockCache:
        """Return the empty decoding state."""
        feed_forward = self.feed_forward.init_cache(batch, max_length) if self.feed_forward else None
        return BlockCache(mixer=self.mixer.init_cache(batch, max_length), feed_forward=feed_forward)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Recipes of norms, mixer and feed-forward layer by parameter name."""
        recipes = {}
        for name, child in self.named_children():
            parts: Mapping[str, Any] = child.recipe() if "norm" not in name else default_recipe(child)
            recipes |= {f"{name}.{key}": value for key, value in parts.items()}
        return recipes

    def flops(self, length: int) -> float:
        """Floating-point operations of one forward pass over one sequence."""
        return self.mixer.flops(length) + (self.feed_forward.flops(length) if self.feed_forward else 0.0)

    def state_bytes(self, length: int) -> int:
        """Bytes of decoding state per sequence of `length` tokens."""
        feed_forward = self.feed_forward.state_bytes(length) if self.feed_forward else 0
        return self.mixer.state_bytes(length) + feed_forward

    def _residual(self, x: Tensor, mix: Half, feed: Half) -> Tensor:
        mixed = x + mix(self.mixer_norm(x))
        if self.feed_forward_norm is None:
            return mixed
        return mixed + feed(self.feed_forward_norm(x if self.parallel else mixed))
