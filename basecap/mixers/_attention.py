"""Shared by softmax attention and Top-1 selection: heads with keys and values, their options, the layer around them."""

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers._canon import Canon
from basecap.mixers._contract import Cache, Mixer, MixerConfig, choose_heads, divide
from basecap.mixers._further import Further
from basecap.mixers._parts import positions_of, refuse_odd_heads, rms_norm, rotary
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, Scheme, constant, default_recipe, matrices

#: What is done to queries and keys: nothing, a norm per head, or one with a learned gain.
HeadNormalisation = Literal["none", "plain", "gain"]


class AttentionHeads(nn.Module):
    """Queries, keys and values of every head; groups of query heads may share keys and values.

    Queries and keys are first normalised to root mean square 1 per head (with a learned gain or without), then all
    three pass the Canon layer, if there is one, then queries and keys are rotated.
    """

    def __init__(
        self,
        hidden: int,
        config: "HeadsConfig",
        *,
        head_dim: int | None = None,
        rotary_fraction: float = 1.0,
        norm: HeadNormalisation = "none",
        bias: bool = False,
    ):
        super().__init__()
        heads, rope_base = config.heads, config.rope_base if config.position == "rope" else None
        self.heads = heads if heads and head_dim else choose_heads(hidden, heads, head_dim or 64)
        self.dim = head_dim or divide(hidden, self.heads, "hidden size by heads")
        self.groups = config.kv_heads or self.heads
        divide(self.heads, self.groups, "heads by kv_heads")
        self.rope_base, self.norm = rope_base, norm
        self.rotary_dims = self.dim if rotary_fraction == 1.0 else 2 * round(self.dim * rotary_fraction / 2)
        if rope_base is not None:
            refuse_odd_heads(self.rotary_dims, self.heads)
        if rope_base is not None and self.rotary_dims < 2:
            raise ConfigError(
                f"rotary_fraction {rotary_fraction} of {self.dim} channels per head leaves RoPE none to rotate; "
                "choose a larger one, or larger heads."
            )
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.groups) * self.dim, bias=bias)
        self.q_gain = nn.Parameter(torch.empty(self.dim)) if norm == "gain" else None
        self.k_gain = nn.Parameter(torch.empty(self.dim)) if norm == "gain" else None
        self.canon = Canon(self.qkv.out_features) if config.canon else None

    def forward(
        self, x_BTD: Tensor, segments: Tensor | None = None, start: int | Tensor = 0, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, T, H, K], k and v [B, T, G, K].

        Positions count from `start`, or within `segments`; `last` is the Canon layer's cache, updated in place.
        """
        widths = [self.heads, self.groups, self.groups]
        q, k, v = self.qkv(x_BTD).unflatten(-1, (-1, self.dim)).split(widths, dim=2)
        if self.norm != "none":
            q, k = rms_norm(q), rms_norm(k)
        if self.q_gain is not None and self.k_gain is not None:
            q, k = q * self.q_gain.to(q.dtype), k * self.k_gain.to(k.dtype)
        if self.canon is not None:
            joined = torch.cat([q, k, v], dim=2).flatten(2)
            joined = self.canon(joined, segments) if last is None else self.canon.extend(joined, last)
            q, k, v = joined.unflatten(-1, (-1, self.dim)).split(widths, dim=2)
        if self.rope_base is None:
            return q, k, v
        positions = start + torch.arange(x_BTD.shape[1], device=x_BTD.device)
        if segments is not None:
            positions = positions_of(segments)
        q, k = (rotary(x, positions, self.rope_base, self.rotary_dims) for x in (q, k))
        return q, k, v

    def values(self, v_BTGK: Tensor) -> Tensor:
        """Return the values of every query head [B, T, H, K]: each group's for all of its heads."""
        return v_BTGK.repeat_interleave(self.heads // self.groups, dim=2)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Normal(0.02); gains start at 1."""
        gains = {name: ParameterRecipe(init=constant(1.0), decay=False) for name in ("q_gain", "k_gain")}
        own = gains if self.norm == "gain" else {}
        if self.canon is not None:
            own = own | {f"canon.{name}": recipe for name, recipe in self.canon.recipe().items()}
        return {**default_recipe(self), **own}

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return room for `capacity` keys and values, [B, capacity, G, K] each, and the state of a Canon layer."""
        shape = (batch, capacity, self.groups, self.dim)
        return self.cache_of({name: self.qkv.weight.new_zeros(shape) for name in ("k", "v")})

    def cache_of(self, tensors: dict[str, Tensor]) -> Cache:
        """Return a cache of tensors that have a place for each position, and of the Canon layer's state."""
        cache = Cache(tensors=tensors, by_position=True)
        if self.canon is not None:
            cache.keep_last("canon", self.canon.init_cache(len(tensors["k"])))
        return cache

    def state_bytes(self, capacity: int) -> int:
        """Bytes of `init_cache(1, capacity)`."""
        canon = 0 if self.canon is None else self.canon.state_bytes()
        return 2 * capacity * self.groups * self.dim * self.qkv.weight.element_size() + canon


class HeadsConfig(MixerConfig):
    """Options of every mixer with queries, keys and values."""

    heads: int | None = Field(None, ge=1, description="query heads; hidden / 64 when not given")
    kv_heads: int | None = Field(None, ge=1, description="key and value heads; as many as heads when not given")
    position: Literal["rope", "alibi", "none"] = "rope"
    rope_base: float = Field(10_000.0, gt=0)
    gate: Literal["none", "elementwise", "per head"] = Field(
        "none", description="sigmoid of the input that gates the mixed values, channel by channel or head by head"
    )
    canon: bool = Field(False, description="whether a Canon layer follows the projection, before positions (place b)")


class SelectionConfig(HeadsConfig):
    """Options of Top-1 selection, whose queries and keys are always normalised."""

    position: Literal["rope", "none"] = "rope"
    qk_gain: bool = Field(False, description="learned gain of the normalised queries and keys")


def refuse_more(config: MixerConfig, option: str, most: int, what: str, length: int) -> None:
    """Raise ConfigError if this option was set to more than the `most` of `what` that sequences of `length` have.

    A default that is too large reads them all.
    """
    asked = getattr(config, option)
    if option in config.model_fields_set and asked > most:
        raise ConfigError(
            f"{option} is {asked}, more than the {what} in a sequence of {length} tokens ({most}); "
            "choose a smaller one."
        )


class HeadedMixer(Mixer):
    """A mixer whose queries choose among the keys of earlier tokens; subclasses say how."""

    sizes: ClassVar = {768: {"heads": 12}, 2048: {"heads": 16}}

    def __init__(
        self,
        config: HeadsConfig,
        layer: LayerSpec,
        *,
        norm: HeadNormalisation,
        head_dim: int | None = None,
        rotary_fraction: float = 1.0,
        bias: bool = False,
    ):
        super().__init__(config, layer)
        self.project = AttentionHeads(
            layer.hidden, config, head_dim=head_dim, rotary_fraction=rotary_fraction, norm=norm, bias=bias
        )
        width = self.project.heads * self.project.dim
        gates = {"none": 0, "elementwise": width, "per head": self.project.heads}[config.gate]
        self.gate = nn.Linear(layer.hidden, gates, bias=bias) if gates else None
        self.out = nn.Linear(width, layer.hidden, bias=bias)

    @abstractmethod
    def attend(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the outputs of every head [B, T, H, K] for q [B, T, H, K], k and v [B, T, G, K], projected from x."""

    @abstractmethod
    def store(self, k: Tensor, v: Tensor, cache: Cache) -> None:
        """Append keys and values [B, T, G, K] to the cache, and their number to its length."""

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Choose and mix; see `Mixer.forward`."""
        q, k, v = self.project(x_BTD, segments)
        return self.finish(self.attend(x_BTD, q, k, v, segments), x_BTD)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a whole prompt and keep the keys and values that later steps can see."""
        q, k, v = self.project(x_BTD, last=cache.tensors.get("canon"))
        self.store(k, v, cache)
        return self.finish(self.attend(x_BTD, q, k, v), x_BTD)

    def attend_at_once(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
        """Store further tokens and return the outputs of their heads, by `attend` among all tokens of the cache."""
        further = Further(cache, x_BTD)
        self.store(k, v, cache)
        keys, values = (cache.tensors[name][:, : further.length].to(q.dtype) for name in ("k", "v"))
        return further.pick(self.attend(further.spread(x_BTD), further.spread(q), keys, values))

    def finish(self, o_BTHK: Tensor, x_BTD: Tensor) -> Tensor:
        """Return what the heads mixed, gated by the input (arXiv 2505.06708, position G1) and projected."""
        if self.gate is not None:
            o_BTHK = o_BTHK * self.gate(x_BTD).sigmoid().unflatten(-1, (self.project.heads, -1))
        return self.out(o_BTHK.flatten(2))

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of every query head, and the outputs of the heads."""
        q, k, v = self.project(x_BTD)
        return self.project.values(v), self.attend(x_BTD, q, k, v)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Normal(0.02), the output projection shrunk with depth; biases 0, gains 1."""
        return self.recipe_by("gpt-2")

    def recipe_by(self, scheme: Scheme) -> dict[str, ParameterRecipe]:
        """Matrices by the scheme, biases 0, gains 1."""
        recipes = {f"project.{name}": recipe for name, recipe in self.project.recipe().items()}
        recipes |= {f"out.{name}": recipe for name, recipe in default_recipe(self.out).items()}
        reading, writing = matrices(scheme, self.layer)
        if self.gate is not None:
            recipes |= {f"gate.{name}": recipe for name, recipe in default_recipe(self.gate).items()}
            recipes["gate.weight"] = reading
        return {**recipes, "project.qkv.weight": reading, "out.weight": writing}

    def projection_flops(self, length: int) -> float:
        """Floating-point operations of the projections over `length` tokens, forward."""
        gate = 0 if self.gate is None else self.gate.weight.numel()
        canon = 0.0 if self.project.canon is None else self.project.canon.flops(length)
        return 2.0 * length * (self.project.qkv.weight.numel() + gate + self.out.weight.numel()) + canon


class StepwiseMixer(HeadedMixer):
    """A mixer that reads a few further tokens one after the other, with one projection of all; subclasses say how.

    Many further tokens attend at once, see `Further`.
    """

    takes_lengths = True
    continues = True

    @abstractmethod
    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, lengths: Tensor | None) -> Tensor:
        """Append one token to the tensors of the cache, and return the outputs of its heads [B, 1, H, K].

        Args:
            q: [B, 1, H, K].
            k: [B, 1, G, K].
            v: as k.
            cache: has `cache.length` tokens, which the caller counts.
            lengths: how many tokens each row has, int64 [B], or None where all have as many.
        """

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Attend from one more token."""
        return self._extend(x_B1D, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, and keep its keys and values."""
        return self._extend(x_BTD, cache) if cache.length else super().prefill(x_BTD, cache)

    def _extend(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        q, k, v = self.project(x_BTD, start=cache.start, last=cache.tensors.get("canon"))
        if self.at_once(x_BTD, cache):
            return self.finish(self.attend_at_once(x_BTD, q, k, v, cache), x_BTD)
        return self.finish(self._attend_in_turn(q, k, v, cache), x_BTD)

    def at_once(self, x_BTD: Tensor, cache: Cache) -> bool:
        """Return whether these further tokens attend at once, by `attend_at_once`, because that takes less time."""
        return Further.at_once(cache, x_BTD)

    def _attend_in_turn(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
        outputs = []
        for t in range(q.shape[1]):
            own, lengths = slice(t, t + 1), None if cache.lengths is None else cache.lengths + t
            outputs.append(self.attend_next(q[:, own], k[:, own], v[:, own], cache, lengths))
            cache.length += 1
        return torch.cat(outputs, dim=1)
