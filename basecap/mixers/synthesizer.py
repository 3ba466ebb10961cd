"""Attention without real relations: keys, or queries and keys, are trainable constants (after Synthesizer)."""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers._contract import Cache, Mixer, MixerConfig, Variant, choose_heads, divide, mixer
from basecap.mixers._parts import positions_of, refuse_odd_heads, remember, rotary
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, default_recipe, normal, residual_std
from basecap.ops import Influence
from basecap.ops.attention import attention, attention_step, influence


@mixer(
    "transformer++ random k",
    backbone="transformer++",
    paper="arXiv 2505.18522, section 3.2.2; arXiv 2005.00743 (Synthesizer)",
    summary="softmax attention whose keys are trainable constants, one per position",
    source="our choice: the authors of arXiv 2505.18522 publish no code and name no initial values",
    differences=(
        "The constants start normal with the size that projections of a normalised input have at first, 0.02 sqrt(D), "
        "so that the scores start as in transformer++; the rest is as there.",
    ),
    variants={
        "transformer++ random qk": Variant(
            options={"constant": "qk"},
            summary="softmax attention whose queries and keys are trainable constants, one each per position",
        ),
    },
)
class Synthesizer(Mixer):
    """Multi-head causal attention o_t = sum_s softmax_s(scale * q_t.c_s) v_s with trainable constants c.

    There is one constant per position, up to the longest training sequence.
    """

    class Config(MixerConfig):
        """Options of attention to constants."""

        heads: int | None = Field(None, ge=1, description="heads; hidden / 64 when not given")
        constant: Literal["k", "qk"] = Field("k", description="what is constant: keys, or queries and keys")
        position: Literal["rope", "none"] = Field("rope", description="as in attention, for the constants too")
        rope_base: float = Field(10_000.0, gt=0)

    sizes: ClassVar = {768: {"heads": 12}, 2048: {"heads": 16}}
    takes_longer = False
    takes_lengths = True
    continues = True

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.heads = choose_heads(layer.hidden, config.heads)
        self.dim = divide(layer.hidden, self.heads, "hidden size by heads")
        if config.position == "rope":
            refuse_odd_heads(self.dim, self.heads)
        constants = (layer.max_length, layer.hidden)
        self.keys = nn.Parameter(torch.empty(constants))
        self.queries = nn.Parameter(torch.empty(constants)) if config.constant == "qk" else None
        self.query = None if config.constant == "qk" else nn.Linear(layer.hidden, layer.hidden, bias=False)
        self.value = nn.Linear(layer.hidden, layer.hidden, bias=False)
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.heads, self.dim))

    def _rotate(self, x_BTHK: Tensor, positions: Tensor) -> Tensor:
        return rotary(x_BTHK, positions, self.config.rope_base) if self.config.position == "rope" else x_BTHK

    def _constants(self, table_LD: Tensor, positions: Tensor, like_BTD: Tensor) -> Tensor:
        chosen = self._split(table_LD[positions].to(like_BTD.dtype))
        chosen = chosen if positions.dim() == 2 else chosen.expand(like_BTD.shape[0], *chosen.shape)
        return self._rotate(chosen, positions)

    def _check(self, length: int) -> None:
        if length > self.layer.max_length:
            raise ConfigError(
                f"there are constants for {self.layer.max_length} positions, not for {length}; "
                "train with longer sequences or take shorter ones."
            )

    def _project(self, x_BTD: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        self._check(x_BTD.shape[1])
        positions = torch.arange(x_BTD.shape[1], device=x_BTD.device) if segments is None else positions_of(segments)
        v_BTD = self.value(x_BTD)
        k = self._constants(self.keys, positions, v_BTD)
        return self._query(x_BTD, positions, v_BTD), k, self._split(v_BTD)

    def _query(self, x_BTD: Tensor, positions: Tensor, like_BTD: Tensor) -> Tensor:
        if self.query is not None:
            return self._rotate(self._split(self.query(x_BTD)), positions)
        assert self.queries is not None
        return self._constants(self.queries, positions, like_BTD)

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Attend; see `Mixer.forward`. Raises ConfigError beyond the longest training sequence."""
        return self.out(attention(*self._project(x_BTD, segments), segments=segments).flatten(2))

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Values of every token, [B, max_length, H, K]."""
        values = self.value.weight.new_zeros(batch, max_length, self.heads, self.dim)
        return Cache(tensors={"v": values}, by_position=True)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Attend from one more token to all constants up to its own."""
        return self._extend(x_B1D, cache)

    def _extend(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Attend from further tokens, each to all constants up to its own."""
        (B, T, _), device = x_BTD.shape, x_BTD.device
        self._check(cache.length + T)
        positions, own = torch.arange(cache.length + T, device=device), cache.start + torch.arange(T, device=device)
        v_BTD = self.value(x_BTD)
        q = self._query(x_BTD, own, v_BTD)
        sees_all = T == 1 and cache.lengths is None
        visible = None if sees_all else (positions <= own[..., None]).expand(B, -1, -1)
        remember(cache, {"v": self._split(v_BTD)})
        values = cache.tensors["v"][:, : cache.length].to(v_BTD.dtype)
        k = self._constants(self.keys, positions, v_BTD)
        return self.out(attention_step(q, k, values, visible_BS=visible).flatten(2))

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Attend over a whole prompt, or more of it, and keep its values."""
        if cache.length:
            return self._extend(x_BTD, cache)
        q, k, v = self._project(x_BTD)
        remember(cache, {"v": v})
        return self.out(attention(q, k, v).flatten(2))

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the attention distribution."""
        q, k, _ = self._project(x_BTD)
        return influence(q, k)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values, and the outputs of attention."""
        q, k, v = self._project(x_BTD)
        return v, attention(q, k, v)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Normal(0.02), the output projection scaled down with depth; constants with the size of projected inputs."""
        constant = ParameterRecipe(init=normal(0.02 * math.sqrt(self.layer.hidden)))
        return {
            **default_recipe(self),
            **{name: constant for name, _ in self.named_parameters(recurse=False)},
            "out.weight": ParameterRecipe(init=normal(residual_std(self.layer))),
        }

    def flops(self, length: int) -> float:
        """Projections plus the causal half of the score and value products."""
        linear = sum(module.weight.numel() for module in (self.query, self.value, self.out) if module is not None)
        return 2.0 * length * linear + 2.0 * length * (length + 1.0) * self.layer.hidden

    def state_bytes(self, length: int) -> int:
        """Values of every token."""
        return length * self.layer.hidden * self.value.weight.element_size()
