"""Softmax attention: transformer, transformer++, its window, position encodings, temperature, gates; pythia."""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers._attention import HeadedMixer, HeadsConfig
from basecap.mixers._contract import Cache, Variant, mixer
from basecap.mixers._parts import remember
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, Scheme, normal
from basecap.ops import Influence, exact_dtype
from basecap.ops.attention import attention, attention_step, influence


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return [H] slopes 2^(-8i/H), i = 1..H (ALiBi, arXiv 2108.12409, section 3); float32.

    Where H is no power of two, those of the power below it, and then every other one of the power above, as in
    ofirpress/attention_with_linear_biases@4b92f28a: fairseq/models/transformer.py.
    """

    def series(count: int) -> Tensor:
        return 2.0 ** (-8.0 * torch.arange(1, count + 1, device=device) / count)

    power = 1 << (heads.bit_length() - 1)
    return torch.cat([series(power), series(2 * power)[::2][: heads - power]])


#: Origin of Canon layers.
CANON = (
    "facebookresearch/PhysicsLM4@924678beb29b862c5e87b9bce73059b2fe02db09: lingua_modified/lingua/canon_helper.py, "
    "lingua_modified/lingua/transformer.py for Canon layers; for the rest our choice, as for transformer++"
)
#: Origin of gated attention.
GATED = (
    "qiuzh20/gated_attention@df42212f08f0ab69d3b26956d61feff730dc3804: modeling_qwen3.py for the gate and the gains of "
    "queries and keys; for the rest our choice, as for transformer++"
)
NARROW = (
    "GeGLU is narrower by as many parameters as the gate has, so that the model is as large as transformer++; the "
    "official models let the gate add to them.",
)


@mixer(
    "transformer++",
    backbone="transformer++",
    paper="arXiv 2104.09864 (RoPE), arXiv 2002.05202 (GeGLU), arXiv 1910.07467 (RMSNorm)",
    summary="softmax attention with RoPE in an RMSNorm and GeGLU block: the reference",
    source="our choice: the authors of arXiv 2505.18522 publish no code and name no initial values",
    differences=(
        "Matrices start as in GPT-2, the usual choice for such blocks: std 0.02, shrunk with depth where they write "
        "into the residual stream.",
        "The head is tied, as 110M parameters at width 768 require: untied they are 134M.",
    ),
    variants={
        "transformer": Variant(
            options={"position": "none", "bias": True},
            backbone="gpt",
            summary="softmax attention in a GPT block: learned positions, LayerNorm, GELU",
            paper="Radford et al. 2019 (GPT-2)",
            source="openai/gpt-2@9b63575ef42771a015060c964af2c3da4cf7c8ab: src/model.py",
            differences=(
                "Projections into the residual stream are shrunk by the square root of their number, as the paper has "
                "it (Radford et al. 2019, section 2.3); the published code, which does not train, leaves that out.",
                "Weight decay is not published; matrices decay, biases and norms do not.",
            ),
        ),
        "pythia": Variant(
            options={"rotary_fraction": 0.25, "bias": True, "scheme": "gpt-neox"},
            backbone="gpt-neox",
            summary="softmax attention in a GPT-NeoX block: parallel residual, rotary on a quarter of each head",
            paper="arXiv 2304.01373 (Pythia), arXiv 2204.06745 (GPT-NeoX)",
            source="EleutherAI/gpt-neox@ea7aefd8f8e183256992d9fede4d7c71a46d67a5: configs/pythia/160M.yml, "
            "megatron/model/init_functions.py, megatron/model/utils.py",
            differences=("8 layers at width 768, as in arXiv 2410.15678; pythia-160m has 12.",),
        ),
        "transformer++ window": Variant(options={"window": 256}, summary="attention to the last 256 tokens"),
        "transformer++ no position": Variant(options={"position": "none"}, summary="no position encoding"),
        "transformer++ alibi": Variant(
            options={"position": "alibi"},
            summary="ALiBi instead of RoPE",
            paper="arXiv 2108.12409 (ALiBi)",
            source="ofirpress/attention_with_linear_biases@4b92f28a005ead2567abe2359f633e73e08f3833: "
            "fairseq/models/transformer.py for the slopes; for the rest our choice, as for transformer++",
        ),
        "transformer++ absolute": Variant(
            options={"position": "none"},
            backbone="transformer++ absolute",
            summary="learned absolute positions instead of RoPE",
        ),
        "transformer++ temperature": Variant(
            options={"qk_norm": True, "temperature": 1.0},
            summary="normalised queries and keys, softmax at a chosen temperature",
        ),
        "transformer++ canon-a": Variant(
            canon="a",
            summary="a Canon layer, a convolution of four tokens with a residual, before attention",
            paper="ssrn 5240330 (Canon layers)",
            source=CANON,
        ),
        "transformer++ canon": Variant(
            canon="abcd",
            summary="Canon layers before attention, on queries, keys and values, before and in the feed-forward layer",
            paper="ssrn 5240330 (Canon layers)",
            source=CANON,
            differences=(
                "RoPE rotates whole heads, as in transformer++; the official models rotate a quarter of each, which "
                "`mixer: {rotary_fraction: 0.25}` in a study does.",
            ),
        ),
        "transformer++ ngram": Variant(
            ngram=6,
            summary="an embedding of the last six tokens beside that of each: it knows by heart what it has met",
            paper="arXiv 2501.16975 (Over-Encoding)",
            source="our choice, as a control: one table of 32,768 rows, for n-grams of one length; the paper adds up "
            "tables with millions of rows, for several lengths",
        ),
        "transformer++ gated": Variant(
            options={"gate": "elementwise"},
            backbone="transformer++ narrow",
            summary="attention whose output is gated by its input, with a narrower GeGLU in return",
            paper="arXiv 2505.06708",
            source=GATED,
            differences=NARROW,
        ),
        "transformer++ qk-norm gated": Variant(
            options={"gate": "elementwise", "qk_norm": True, "qk_gain": True},
            backbone="transformer++ narrow",
            summary="transformer++ gated with normalised queries and keys, each with a learned gain",
            paper="arXiv 2505.06708, arXiv 2302.05442 (QK norm)",
            source=GATED,
            differences=NARROW,
        ),
    },
)
class Attention(HeadedMixer):
    """Multi-head causal softmax attention."""

    takes_lengths = True
    continues = True

    class Config(HeadsConfig):
        """Options of softmax attention."""

        head_dim: int | None = Field(None, ge=1, description="channels per head; hidden / heads when not given")
        position: Literal["rope", "alibi", "none"] = "rope"
        rotary_fraction: float = Field(1.0, gt=0, le=1, description="share of each head that RoPE rotates")
        window: int | None = Field(None, ge=1, description="tokens a query sees, itself included; None: all")
        qk_norm: bool = Field(False, description="normalise queries and keys to root mean square 1 per head")
        qk_gain: bool = Field(False, description="learned gains of the normalised queries and keys, one per channel")
        temperature: float = Field(1.0, gt=0, description="the scores are divided by it before the softmax")
        sinks: bool = Field(False, description="a learned score per head that joins the softmax's denominator alone")
        bias: bool = False
        scheme: Scheme = Field("gpt-2", description="how its matrices start: as in gpt-2 or gpt-neox, or plain: 0.02")

    def __init__(self, config: Config, layer: LayerSpec):
        if config.qk_gain and not config.qk_norm:
            raise ConfigError("qk_gain is the gain of normalised queries and keys; set qk_norm: true with it.")
        super().__init__(
            config,
            layer,
            norm="gain" if config.qk_gain else "plain" if config.qk_norm else "none",
            head_dim=config.head_dim,
            rotary_fraction=config.rotary_fraction,
            bias=config.bias,
        )
        self.scale = self.project.dim**-0.5 / config.temperature
        self.sinks = nn.Parameter(torch.empty(self.project.heads)) if config.sinks else None

    def _slopes(self, device: torch.device) -> Tensor | None:
        return alibi_slopes(self.project.heads, device) if self.config.position == "alibi" else None

    def attend(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
        """Attend; see `HeadedMixer.attend`."""
        slopes, window = self._slopes(q.device), self.config.window
        return attention(q, k, v, scale=self.scale, window=window, slopes=slopes, segments=segments, sinks=self.sinks)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Keys and values of the last `window` (else `max_length`) tokens: a ring, [B, capacity, G, K] each."""
        cache = self.project.init_cache(batch, self._visible(max_length))
        cache.by_position = cache.by_position and not self._is_ring(cache)
        return cache

    def _is_ring(self, cache: Cache) -> bool:
        return cache.tensors["k"].shape[1] == self.config.window

    def _visible(self, length: int) -> int:
        return length if self.config.window is None else min(length, self.config.window)

    def store(self, k: Tensor, v: Tensor, cache: Cache) -> None:
        """Append to the cache; see `HeadedMixer.store`."""
        remember(cache, {"k": k, "v": v}, ring=self._is_ring(cache))

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Attend from one more token to the cache."""
        start = cache.start
        q, k, v = self.project(x_B1D, start=start, last=cache.tensors.get("canon"))
        self.store(k, v, cache)
        capacity = cache.tensors["k"].shape[1]
        seen = min(cache.length, capacity)
        keys, values = (cache.tensors[name][:, :seen].to(q.dtype) for name in ("k", "v"))
        slopes, bias = self._slopes(q.device), None
        if slopes is not None:
            age = (start - torch.arange(seen, device=q.device)) % capacity
            # In float64 the products are exact, like the scores.
            bias = -slopes.to(exact_dtype(q.device))[:, None] * age[..., None, :]
        visible = None if cache.lengths is None else torch.arange(seen, device=q.device) <= start
        o_B1HK = attention_step(q, keys, values, scale=self.scale, bias_HS=bias, visible_BS=visible, sinks=self.sinks)
        return self.finish(o_B1HK, x_B1D)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, and keep the keys and values that later tokens can see."""
        if not cache.length:
            return super().prefill(x_BTD, cache)
        q, k, v = self.project(x_BTD, start=cache.start, last=cache.tensors.get("canon"))
        window = self.config.window is not None and cache.lengths is None
        o_BTHK = self._attend_in_window(x_BTD, q, k, v, cache) if window else self._attend_to_all(q, k, v, cache)
        self.store(k, v, cache)
        return self.finish(o_BTHK, x_BTD)

    def _attend_in_window(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
        """Attend from further tokens of equally long sequences as a prompt of what the window holds and them does."""
        held = cache.tensors["k"].shape[1]
        seen = min(cache.length, held)
        slots = torch.arange(cache.length - seen, cache.length, device=q.device) % held
        keys, values = (
            torch.cat([cache.tensors[name][:, slots].to(q.dtype), new], dim=1) for name, new in (("k", k), ("v", v))
        )
        return self.attend(x_BTD, F.pad(q, (0, 0, 0, 0, seen, 0)), keys, values)[:, seen:]

    def _attend_to_all(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
        """Attend from further tokens to the cache and each other, by the position of each key."""
        start, (B, T, *_), held = cache.start, q.shape, cache.tensors["k"].shape[1]
        slots = torch.arange(min(cache.length, held), device=q.device)
        keys, values = (
            torch.cat([cache.tensors[name][:, : len(slots)].to(q.dtype), new], dim=1)
            for name, new in (("k", k), ("v", v))
        )
        query = start + torch.arange(T, device=q.device)
        # The last position that belongs to a slot; negative where there is none yet.
        place = torch.cat([start - 1 - (start - 1 - slots) % held, query], dim=-1)[..., None, :]
        age = query[..., None] - place
        visible = (age >= 0) & (place >= 0)
        if self.config.window is not None:
            visible = visible & (age < self.config.window)
        slopes, bias = self._slopes(q.device), None
        if slopes is not None:
            bias = (-slopes.double()[:, None, None] * age[..., None, :, :]).expand(B, -1, -1, -1)
        visible, sinks = visible.expand(B, -1, -1), self.sinks
        return attention_step(q, keys, values, scale=self.scale, bias_HS=bias, visible_BS=visible, sinks=sinks)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the attention distribution."""
        q, k, _ = self.project(x_BTD)
        slopes = self._slopes(q.device)
        return influence(q, k, scale=self.scale, window=self.config.window, slopes=slopes, sinks=self.sinks)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Matrices by the scheme, biases 0; sinks as in openai/gpt-oss's models, normal(0.02)."""
        sinks = {} if self.sinks is None else {"sinks": ParameterRecipe(init=normal(0.02), decay=False)}
        return self.recipe_by(self.config.scheme) | sinks

    def flops(self, length: int) -> float:
        """Projections plus the causal half (or the band) of the score and value products."""
        W = self._visible(length)
        pairs = W * (W + 1) / 2 + (length - W) * W
        return self.projection_flops(length) + 4.0 * pairs * self.project.heads * self.project.dim

    def state_bytes(self, length: int) -> int:
        """Keys and values of every visible token."""
        return self.project.state_bytes(self._visible(length))
