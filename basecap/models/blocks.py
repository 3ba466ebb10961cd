"""One residual block for every architecture: norm and mixer, then, in some backbones, norm and feed-forward layer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from basecap.mixers import (
    Cache,
    Canon,
    Mixer,
    ParameterRecipe,
    declared_cost,
    declared_recipe,
    default_recipe,
    refuse_other_losses,
    refuse_other_shape,
    step_rows,
)
from basecap.models.backbones import Backbone, FeedForwardLayer

#: Activations between two blocks: the residual stream, and the output of the previous block, if any, still to be added.
Stream = tuple[Tensor, Tensor | None]
#: Auxiliary losses of a block, scalars by name.
Losses = dict[str, Tensor]
#: `Block.forward`, possibly compiled.
BlockForward = Callable[..., tuple[Tensor, Tensor | None, Losses]]


def total(x: Tensor, added: Tensor | None) -> Tensor:
    """Return x + added; x alone before the first block."""
    return x if added is None else x + added


def nothing_added(x: Tensor) -> Tensor:
    """Return zeros like what blocks add, in autocast's dtype where that is on.

    With them the first block runs the compiled code of the others.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return torch.zeros_like(x, dtype=dtype)


@dataclass(kw_only=True)
class BlockCache:
    """The decoding state of one block: its mixer's and its feed-forward layer's."""

    mixer: Cache
    feed_forward: Cache

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.mixer.nbytes + self.feed_forward.nbytes

    @property
    def by_position(self) -> bool:
        """Whether a prompt may be padded on the right, see `Cache`."""
        return self.mixer.by_position and self.feed_forward.by_position

    def rows(self, start: int, end: int) -> "BlockCache":
        """Return the state of sequences `start` to `end`; tensors that are written in place stay shared."""
        return BlockCache(mixer=self.mixer.rows(start, end), feed_forward=self.feed_forward.rows(start, end))

    def write(self, part: "BlockCache", start: int) -> None:
        """Copy the decoding state `part`, as returned by `rows`, to the sequences from `start` on."""
        self.mixer.write(part.mixer, start)
        self.feed_forward.write(part.feed_forward, start)

    def take(self, rows: Tensor) -> "BlockCache":
        """Return a copy of the state of the sequences `rows`, int64 indices in any order, some of them repeated."""
        return BlockCache(mixer=self.mixer.take(rows), feed_forward=self.feed_forward.take(rows))

    def put(self, part: "BlockCache", rows: Tensor) -> None:
        """Copy the tensors of `part` to the sequences `rows`; raises ConfigError, see `Cache.put`."""
        self.mixer.put(part.mixer, rows)
        self.feed_forward.put(part.feed_forward, rows)

    def set_lengths(self, lengths_B: Tensor, longest: int) -> None:
        """Set how many tokens each sequence has so far, int64 [B], and the largest of these numbers."""
        self.mixer.set_lengths(lengths_B, longest)
        self.feed_forward.set_lengths(lengths_B, longest)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)); or both from the same x if the backbone is parallel.

    The next block computes the last sum, so that a compiler can fuse it with the norm.
    """

    def __init__(self, backbone: Backbone, mixer: Mixer):
        super().__init__()
        self.parallel = backbone.parallel
        self.mixer_norm = backbone.make_norm(mixer.layer.hidden)
        self.mixer = mixer
        self.feed_forward_norm: nn.Module | None = None
        self.feed_forward: FeedForwardLayer | None = None
        if backbone.feed_forward is not None:
            self.feed_forward_norm = backbone.make_norm(mixer.layer.hidden)
            self.feed_forward = backbone.feed_forward(mixer.layer)
        places = mixer.layer.canon
        self.canon_a = Canon(mixer.layer.hidden) if "a" in places else None
        self.canon_c = Canon(mixer.layer.hidden) if "c" in places and self.feed_forward is not None else None

    def forward(
        self,
        x_BTD: Tensor,
        added_BTD: Tensor | None,
        segments: Tensor | None,
        shared: dict[str, Tensor],
        auxiliary: bool = False,
    ) -> tuple[Tensor, Tensor | None, Losses]:
        """Transform a batch, x + added; `segments` and `shared` as in `Mixer`.

        With `auxiliary` the mixer's losses are computed and returned too, as results, so that they count once where
        activations are recomputed; otherwise there are none.
        """
        extra = (shared,) if self.mixer.takes_shared else ()
        own: Losses = {}
        losses = {"losses": own} if auxiliary and self.mixer.auxiliary else {}
        x, added = self._residual(
            total(x_BTD, added_BTD),
            lambda h: self.mixer(h, segments, *extra, **losses),
            lambda feed, h: feed(h, segments),
            lambda canon, name, h: canon(h, segments),
        )
        if losses:
            refuse_other_losses(self.mixer, own)
        return x, added, own

    @property
    def continues(self) -> bool:
        """Whether `prefill` also reads further tokens into a cache that is not empty."""
        parts = (self.mixer,) if self.feed_forward is None else (self.mixer, self.feed_forward)
        return all(getattr(part, "continues", False) for part in parts)

    def step(self, x_B1D: Tensor, added_B1D: Tensor | None, cache: BlockCache, shared: dict[str, Tensor]) -> Stream:
        """Transform one more token, x + added, updating `cache`."""
        own = shared if self.mixer.takes_shared else None
        return self._residual(
            total(x_B1D, added_B1D),
            lambda h: step_rows(self.mixer, h, cache.mixer, own),
            lambda feed, h: step_rows(feed, h, cache.feed_forward),
            lambda canon, name, h: canon.extend(h, cache.mixer.tensors[name]),
        )

    def prefill(self, x_BTD: Tensor, added_BTD: Tensor | None, cache: BlockCache, shared: dict[str, Tensor]) -> Stream:
        """Transform a prompt, x + added, filling the empty `cache`."""
        extra = (shared,) if self.mixer.takes_shared else ()
        return self._residual(
            total(x_BTD, added_BTD),
            lambda h: self.mixer.prefill(h, cache.mixer, *extra),
            lambda feed, h: feed.prefill(h, cache.feed_forward),
            lambda canon, name, h: canon.extend(h, cache.mixer.tensors[name]),
        )

    def init_cache(self, batch: int, max_length: int) -> BlockCache:
        """Return the empty decoding state."""
        empty = Cache(tensors={}, by_position=True)
        feed_forward = empty if self.feed_forward is None else self.feed_forward.init_cache(batch, max_length)
        mixer = self.mixer.init_cache(batch, max_length)
        for name, canon in self._canons().items():  # beside the mixer's own state, which does not have these names
            mixer.keep_last(name, canon.init_cache(batch))
        return BlockCache(mixer=mixer, feed_forward=feed_forward)

    def _canons(self) -> dict[str, Canon]:
        """Return the block's own Canon layers by name; mixer and feed-forward layer have those at b and d."""
        return {name: x for name, x in (("canon_a", self.canon_a), ("canon_c", self.canon_c)) if x is not None}

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Recipes of norms, mixer and feed-forward layer by parameter name."""
        norms = {"mixer_norm": self.mixer_norm, "feed_forward_norm": self.feed_forward_norm}
        parts = {name: default_recipe(norm) for name, norm in norms.items() if norm is not None}
        parts |= {name: canon.recipe() for name, canon in self._canons().items()}
        parts["mixer"] = dict(declared_recipe(self.mixer))
        if self.feed_forward is not None:
            parts["feed_forward"] = self.feed_forward.recipe()
        return {f"{name}.{key}": recipe for name, recipes in parts.items() for key, recipe in recipes.items()}

    def flops(self, length: int) -> float:
        """Floating-point operations of one forward pass over one sequence."""
        return declared_cost(self.mixer, "flops", length) + self._other_flops(length)

    def training_flops(self, length: int) -> float:
        """Floating-point operations of one forward and backward pass over one sequence."""
        return declared_cost(self.mixer, "training_flops", length) + 3.0 * self._other_flops(length)

    def _other_flops(self, length: int) -> float:
        feed_forward = 0.0 if self.feed_forward is None else self.feed_forward.flops(length)
        return feed_forward + sum(canon.flops(length) for canon in self._canons().values())

    def state_bytes(self, length: int) -> int:
        """Bytes of decoding state per sequence of `length` tokens."""
        feed_forward = 0 if self.feed_forward is None else self.feed_forward.state_bytes(length)
        canons = sum(canon.state_bytes() for canon in self._canons().values())
        return int(declared_cost(self.mixer, "state_bytes", length)) + feed_forward + canons

    def _residual(
        self,
        x: Tensor,
        mix: Callable[[Tensor], Tensor],
        feed: Callable[[FeedForwardLayer, Tensor], Tensor],
        convolve: Callable[[Canon, str, Tensor], Tensor],
    ) -> Stream:
        h = self.mixer_norm(x)
        added = mix(h if self.canon_a is None else convolve(self.canon_a, "canon_a", h))
        refuse_other_shape(self.mixer, added, x)
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x, added
        mixed = x + added
        h = self.feed_forward_norm(x if self.parallel else mixed)
        return mixed, feed(self.feed_forward, h if self.canon_c is None else convolve(self.canon_c, "canon_c", h))


def names_of_auxiliary(blocks: Sequence[Block]) -> list[str]:
    """Return the names of the auxiliary losses of these blocks."""
    return sorted({name for block in blocks for name in block.mixer.auxiliary})


def gather_auxiliary(blocks: Sequence[Block], losses: Sequence[Losses], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses of all blocks, and the mean of each over the blocks that have it, [N].

    The sum has a gradient and the means are without; the dtype is that of `like`.
    """
    weighted, means = torch.zeros_like(like), []
    for block, own in zip(blocks, losses, strict=True):
        for name, weight in block.mixer.auxiliary.items():
            weighted = weighted + weight * own[name]
    for name in names_of_auxiliary(blocks):
        each = [own[name].detach() for own in losses if name in own]
        means.append(torch.stack(each).mean().to(like.dtype))
    return weighted, torch.stack(means) if means else like.new_zeros(0)


def through(blocks: Sequence[Callable[..., Stream]], x: Tensor, caches: Iterable[BlockCache], *, alike: bool) -> Stream:
    """Return the activations after `prefill` or `step` of each block; `alike`: see `nothing_added`."""
    added = nothing_added(x) if alike and len(blocks) > 1 else None
    shared: dict[str, Tensor] = {}
    for block, cache in zip(blocks, caches, strict=True):
        x, added = block(x, added, cache, shared)
    return x, added
