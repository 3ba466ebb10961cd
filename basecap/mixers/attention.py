"""Softmax attention: transformer, transformer++, its sliding window, position encodings, temperature; pythia."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import (
    Cache,
    LayerSpec,
    Mixer,
    MixerConfig,
    ParameterRecipe,
    Variant,
    choose_heads,
    default_recipe,
    divide,
    mixer,
    normal,
    residual_std,
)
from basecap.mixers._parts import positions_of, rms_norm, rotary
from basecap.ops.attention import attention, reference


def alibi_slopes(heads: int) -> Tensor:
    """Return [H] slopes 2^(-8i/H), i = 1..H (ALiBi, arXiv 2108.12409, section 3)."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


@mixer(
    "transformer++",
    backbone="transformer++",
    paper="arXiv 2104.09864 (RoPE), arXiv 2002.05202 (GeGLU), arXiv 1910.07467 (RMSNorm)",
    summary="softmax attention with RoPE in an RMSNorm and GeGLU block: the reference",
    variants={
        "transformer": Variant(
            options={"position": "none", "bias": True},
            backbone="gpt",
            summary="softmax attention in a GPT block: learned positions, LayerNorm, GELU",
        ),
        "pythia": Variant(
            options={"rotary_fraction": 0.25, "bias": True},
            backbone="gpt-neox",
            summary="softmax attention in a GPT-NeoX block: parallel residual, rotary on a quarter of each head",
        ),
        "transformer++ window": Variant(options={"window": 256}, summary="attention to the last 256 tokens"),
        "transformer++ no position": Variant(options={"position": "none"}, summary="no position encoding"),
        "transformer++ alibi": Variant(options={"position": "alibi"}, summary="ALiBi instead of RoPE"),
        "transformer++ absolute": Variant(
            options={"position": "none"},
            backbone="transformer++ absolute",
            summary="learned absolute positions instead of RoPE",
        ),
        "transformer++ temperature": Variant(
            options={"qk_norm": True, "temperature": 1.0},
            summary="normalised queries and keys, softmax at a chosen temperature",
        ),
    },
)
class Attention(Mixer):
    """Multi-head causal softmax attention."""

    class Config(MixerConfig):
        """Options of softmax attention."""

        heads: int | None = Field(None, ge=1, description="query heads; hidden / 64 when not given")
        kv_heads: int | None = Field(None, ge=1, description="key and value heads; as many as heads when not given")
        position: Literal["rope", "alibi", "none"] = "rope"
        rope_base: float = Field(10_000.0, gt=0)
        rotary_fraction: float = Field(1.0, gt=0, le=1, description="share of each head that RoPE rotates")
        window: int | None = Field(None, ge=1, description="tokens a query sees, itself included; None: all")
        qk_norm: bool = Field(False, description="normalise queries and keys to root mean square 1 per head")
        temperature: float = Field(1.0, gt=0, description="the scores are divided by it before the softmax")
        bias: bool = False

    sizes: ClassVar = {768: {"heads": 12}, 2048: {"heads": 16}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.heads = choose_heads(layer.hidden, config.heads)
        self.head_dim = divide(layer.hidden, self.heads, "hidden size by heads")
        self.kv_heads = config.kv_heads or self.heads
        divide(self.heads, self.kv_heads, "heads by kv_heads")
        self.rotary_dims = 2 * round(self.head_dim * config.rotary_fraction / 2)
        if config.position == "rope" and config.rotary_fraction == 1.0:
            divide(self.head_dim, 2, "head size into the pairs that RoPE rotates")
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(layer.hidden, width, bias=config.bias)
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=config.bias)
        self.scale = self.head_dim**-0.5 / config.temperature

    def _project(self, x_BTD: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.config.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        if self.config.position == "rope":
            q = rotary(q, positions, self.config.rope_base, self.rotary_dims)
            k = rotary(k, positions, self.config.rope_base, self.rotary_dims)
        return q, k, v

    def _slopes(self, x: Tensor) -> Tensor | None:
        return alibi_slopes(self.heads).to(x.device) if self.config.position == "alibi" else None

    def _positions(self, x_BTD: Tensor, segments: Tensor | None) -> Tensor:
        return torch.arange(x_BTD.shape[1], device=x_BTD.device) if segments is None else positions_of(segments)

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Attend; see `Mixer.forward`."""
        q, k, v = self._project(x_BTD, self._positions(x_BTD, segments))
        o_BTHV = attention(
            q,
            k,
            v,
            scale=self.scale,
            window=self.config.window,
            slopes=self._slopes(x_BTD),
            segments=segments,
        )
        return self.out(o_BTHV.flatten(2))

    def _capacity(self, length: int) -> int:
        return length if self.config.window is None else min(length, self.config.window)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Keys and values of the last `window` (else `max_length`) tokens: a ring, [B, capacity, G, K] each."""
        shape = (batch, self._capacity(max_length), self.kv_heads, self.head_dim)
        weight = self.qkv.weight
        return Cache(tensors={"k": weight.new_zeros(shape), "v": weight.new_zeros(shape)})

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Attend from one more token to the cache."""
        keys, values = cache.tensors["k"], cache.tensors["v"]
        capacity = keys.shape[1]
        q, k, v = self._project(x_B1D, torch.tensor([cache.length], device=x_B1D.device))
        slot = cache.length % capacity
        keys[:, slot] = k[:, 0]
        values[:, slot] = v[:, 0]
        cache.length += 1
        seen = min(cache.length, capacity)
        scores = torch.einsum("bgrk,bsgk->bgrs", self._grouped(q), keys[:, :seen].to(q.dtype)) * self.scale
        slopes = self._slopes(x_B1D)
        if slopes is not None:
            age = (slot - torch.arange(seen, device=x_B1D.device)) % capacity
            scores = scores - slopes.view(1, self.kv_heads, -1, 1) * age
        weights = scores.float().softmax(-1).to(q.dtype) if q.dtype != torch.float64 else scores.softmax(-1)
        o = torch.einsum("bgrs,bsgv->bgrv", weights, values[:, :seen].to(q.dtype))
        return self.out(o.flatten(1)[:, None])

    def _grouped(self, q_B1HK: Tensor) -> Tensor:
        return q_B1HK[:, 0].unflatten(1, (self.kv_heads, -1))

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Attend over a whole prompt and keep the keys and values the following steps can see."""
        q, k, v = self._project(x_BTD, self._positions(x_BTD, None))
        capacity, length = cache.tensors["k"].shape[1], x_BTD.shape[1]
        slots = torch.arange(max(0, length - capacity), length, device=x_BTD.device)
        cache.tensors["k"][:, slots % capacity] = k[:, slots].to(cache.tensors["k"].dtype)
        cache.tensors["v"][:, slots % capacity] = v[:, slots].to(cache.tensors["v"].dtype)
        cache.length = length
        o_BTHV = attention(q, k, v, scale=self.scale, window=self.config.window, slopes=self._slopes(x_BTD))
        return self.out(o_BTHV.flatten(2))

    def influence(self, x_BTD: Tensor) -> Tensor:
        """Return the attention distribution [B, H, T, T]."""
        q, k, _ = self._project(x_BTD, self._positions(x_BTD, None))
        return reference.weights(q, k, self.scale, self.config.window, self._slopes(x_BTD))

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values, repeated for every query head, and what attention makes of them."""
        q, k, v = self._project(x_BTD, self._positions(x_BTD, None))
        o_BTHV = attention(q, k, v, scale=self.scale, window=self.config.window, slopes=self._slopes(x_BTD))
        return v.repeat_interleave(self.heads // self.kv_heads, dim=2), o_BTHV

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Normal(0.02), the output projection shrunk with depth."""
        std = residual_std(self.layer)
        return {**default_recipe(self), "out.weight": ParameterRecipe(init=normal(std))}

    def flops(self, length: int) -> float:
        """Projections plus the causal half (or the band) of the score and value products."""
        W = self._capacity(length)
        pairs = W * (W + 1) / 2 + (length - W) * W
        weights = self.qkv.weight.numel() + self.out.weight.numel()
        return 2.0 * length * weights + 4.0 * pairs * self.heads * self.head_dim

    def state_bytes(self, length: int) -> int:
        """Keys and values of every visible token."""
        width = 2 * self.kv_heads * self.head_dim
        return self._capacity(length) * width * self.qkv.weight.element_size()
