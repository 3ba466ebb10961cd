"""The definition of a backbone: everything around the sequence mixers of a language model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor, nn

from basecap.mixers import Cache, Initialiser, LayerSpec, ParameterRecipe, normal
from basecap.registry import Registry


class FeedForwardLayer(Protocol):
    """The second half of a block: `models.feed_forward.FeedForward`, or a layer that also reads the previous token."""

    def __call__(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor: ...
    def init_cache(self, batch: int, max_length: int) -> Cache: ...
    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor: ...
    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor: ...
    def recipe(self) -> dict[str, ParameterRecipe]: ...
    def flops(self, length: int) -> float: ...
    def state_bytes(self, length: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Everything around the mixers: norms, feed-forward layers, positions, embedding and head.

    Attributes:
        summary: one line for `basecap list backbones`.
        paper: where it is defined.
        norm: RMSNorm or LayerNorm before each half of a block and before the head.
        eps: their epsilon.
        feed_forward: builds the second half of a block; None: blocks are mixers only.
        parallel: both halves read the same input (GPT-NeoX) instead of one after the other.
        positions: whether learned absolute positions are added to the embeddings.
        embedding_norm: a LayerNorm follows the embeddings.
        tied: the head is the transposed embedding, as published; comparisons at equal size set it in their study.
        embedding, head: their initialisers; a tied matrix starts as an embedding.
        embedding_decay: whether the embedding's weights decay; a separate head always does.
        depths: published depths by hidden width, in layers of a Transformer; others take 12.
        depth_factor: blocks per Transformer layer (2 if a block is a mixer only).
        differences: one sentence for each deliberate difference from the official code, with its reason.
    """

    summary: str
    paper: str
    norm: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    feed_forward: Callable[[LayerSpec], FeedForwardLayer] | None = None
    parallel: bool = False
    positions: Literal["none", "learned"] = "none"
    embedding_norm: bool = False
    tied: bool = True
    embedding: Initialiser = field(default_factory=lambda: normal(0.02))
    head: Initialiser = field(default_factory=lambda: normal(0.02))
    embedding_decay: bool = True
    depths: Mapping[int, int] = field(default_factory=lambda: {768: 12, 2048: 24})
    depth_factor: float = 1.0
    differences: tuple[str, ...] = ()

    def depth(self, hidden: int, layers: int | None) -> int:
        """Return the number of blocks for `layers` Transformer layers (published depth, else 12, when None)."""
        layers = self.depths.get(hidden, 12) if layers is None else layers
        return round(layers * self.depth_factor)

    def make_norm(self, hidden: int) -> nn.Module:
        """Return a fresh normalisation layer of width `hidden`."""
        return nn.RMSNorm(hidden, self.eps) if self.norm == "rms" else nn.LayerNorm(hidden, self.eps)


BACKBONES: Registry[Backbone] = Registry("backbone", "basecap.models.backbones", "backbones")


def backbone(name: str) -> Callable[[Callable[[], Backbone]], Callable[[], Backbone]]:
    """Decorator: register the backbone that the decorated function returns."""

    def register(build: Callable[[], Backbone]) -> Callable[[], Backbone]:
        BACKBONES.add(name, build(), build)
        return build

    return register
