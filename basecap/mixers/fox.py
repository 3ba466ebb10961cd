"""The Forgetting Transformer (arXiv 2503.02130): softmax attention with a forget gate per head and token; Pro."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import Cache, Mixer, MixerConfig, Variant, choose_heads, divide, mixer
from basecap.mixers._further import Further
from basecap.mixers._parts import positions_of, refuse_odd_heads, remember, rms_norm, rotary, token_shift
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, default_recipe
from basecap.ops import Influence
from basecap.ops.forgetting_attention import forgetting_attention, forgetting_attention_step, influence

#: Origin of the official values.
REPOSITORY = "zhixuan-lin/forgetting-transformer@246d5e3f9c608d7a32141ba642bbb6babec5a35d"
PLACES = "src/forgetting_transformer/model/forgetting_transformer/modeling_forgetting_transformer.py"

#: Epsilon of the norms of queries and keys: the default of the official class; the output's is that of the model, 1e-6.
EPS = 1e-5


@mixer(
    "fox",
    backbone="swiglu",
    paper="arXiv 2503.02130",
    summary="softmax attention without positions, whose weights decay with a forget gate per head and token",
    source=f"{REPOSITORY}: {PLACES}, configs/experiment/longcrawl64/forgetting_transformer/llama_125m_2b.yaml",
    variants={
        "fox pro": Variant(
            options={"shift": True, "qk_norm": True, "gate": True},
            backbone="swiglu narrow",
            summary="fox with shifted keys and values, normalised queries and keys, a gated output norm",
            source=f"{REPOSITORY}: {PLACES}, configs/experiment/longcrawl64/forgetting_transformer/pro_125m_2b.yaml",
        ),
    },
)
class Fox(Mixer):
    """Multi-head causal attention with forget gates, and what the Pro form adds to it.

    l = logsigmoid(W_f x + b_f) per head and token; a weight is exp(q_t.k_s / sqrt(K) + sum_{s<r<=t} l_r), normalised.
    Pro: k and v are averages of a token's and the previous token's by a share that depends on the token; q and k are
    normalised per head with a gain; the output of each head is normalised and gated by the input.
    """

    takes_lengths = True
    continues = True

    class Config(MixerConfig):
        """Options of the Forgetting Transformer."""

        heads: int | None = Field(None, ge=1, description="heads; hidden / 64 when not given")
        position: Literal["none", "rope"] = "none"
        rope_base: float = Field(500_000.0, gt=0)
        shift: bool = Field(False, description="whether keys and values mix with those of the previous token")
        qk_norm: bool = Field(False, description="normalise queries and keys per head, with a gain for each channel")
        gate: bool = Field(False, description="whether the heads' outputs are normalised and gated by the input")

    sizes: ClassVar = {768: {"heads": 12}, 1024: {"heads": 16}, 2048: {"heads": 32}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.heads = choose_heads(layer.hidden, config.heads)
        self.dim = divide(layer.hidden, self.heads, "hidden size by heads")
        if config.position == "rope":
            refuse_odd_heads(self.dim, self.heads)
        self.qkv = nn.Linear(layer.hidden, 3 * layer.hidden, bias=False)
        self.forget = nn.Linear(layer.hidden, self.heads)
        self.shift = nn.Linear(layer.hidden, 2 * self.heads, bias=False) if config.shift else None
        self.q_gain, self.k_gain = (
            nn.Parameter(torch.empty(self.heads, self.dim)) if config.qk_norm else None for _ in range(2)
        )
        self.gate = nn.Linear(layer.hidden, layer.hidden, bias=False) if config.gate else None
        self.norm_weight = nn.Parameter(torch.empty(self.heads, self.dim)) if config.gate else None
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def _inputs(
        self, x_BTD: Tensor, segments: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v [B, T, H, K] and the log forget gates [B, T, H], in float32 or wider; updates a cache."""
        q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        if self.shift is not None:
            shares = self.shift(x_BTD).chunk(2, dim=-1)
            k, v = (
                self._shifted(x, share, segments, None if cache is None else cache.tensors[name])
                for x, share, name in ((k, shares[0], "last_k"), (v, shares[1], "last_v"))
            )
        q, k, v = (x.unflatten(-1, (self.heads, self.dim)) for x in (q, k, v))
        if self.q_gain is not None and self.k_gain is not None:
            q, k = rms_norm(q, EPS) * self.q_gain.to(q.dtype), rms_norm(k, EPS) * self.k_gain.to(k.dtype)
        if self.config.position == "rope":
            start = 0 if cache is None else cache.start
            positions = start + torch.arange(x_BTD.shape[1], device=x_BTD.device)
            positions = positions if segments is None else positions_of(segments)
            q, k = (rotary(x, positions, self.config.rope_base) for x in (q, k))
        gates = self.forget(x_BTD)
        return q, k, v, F.logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))

    def _shifted(self, x_BTD: Tensor, share_BTH: Tensor, segments: Tensor | None, last_BD: Tensor | None) -> Tensor:
        """Return share * previous + (1 - share) * x; the token before the first is `last`, which becomes the newest."""
        previous = token_shift(x_BTD, segments)
        if last_BD is not None:
            previous = torch.cat([last_BD[:, None].to(x_BTD.dtype), previous[:, 1:]], dim=1)
            last_BD.copy_(x_BTD[:, -1])
        share = share_BTH.sigmoid().repeat_interleave(self.dim, dim=-1)
        return x_BTD + share * (previous - x_BTD)

    def _finish(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        if self.gate is None or self.norm_weight is None:
            return self.out(o_BTHV.flatten(2))
        o_BTHV = rms_norm(o_BTHV) * self.norm_weight.to(o_BTHV.dtype)
        return self.out(o_BTHV.flatten(2) * self.gate(x_BTD).sigmoid())

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Attend; see `Mixer.forward`."""
        return self._finish(forgetting_attention(*self._inputs(x_BTD, segments), segments=segments), x_BTD)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Keys and values [B, max_length, H, K], log gates [B, max_length, H], the last key and value before shifts."""
        weight, shape = self.out.weight, (batch, max_length, self.heads)
        tensors = {name: weight.new_zeros(*shape, self.dim) for name in ("k", "v")}
        tensors["log_decay"] = weight.new_zeros(shape, dtype=torch.promote_types(weight.dtype, torch.float32))
        cache = Cache(tensors=tensors, by_position=True)
        if self.shift is not None:
            for name in ("last_k", "last_v"):
                cache.keep_last(name, weight.new_zeros(batch, self.layer.hidden))
        return cache

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Attend from one more token to the cache."""
        return self._extend(x_B1D, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Attend over a whole prompt, or more of it, and keep what later steps need."""
        if cache.length:
            return self._extend(x_BTD, cache)
        q, k, v, log_decay = self._inputs(x_BTD, cache=cache)
        remember(cache, {"k": k, "v": v, "log_decay": log_decay})
        return self._finish(forgetting_attention(q, k, v, log_decay), x_BTD)

    def _extend(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Attend from further tokens, a few of them one after the other, with one projection of all."""
        start = cache.start
        outputs: list[Tensor] = []  # PyTorch's compiler traces no list[Tensor]()
        further = Further(cache, x_BTD) if Further.at_once(cache, x_BTD) else None
        q, k, v, log_decay = self._inputs(x_BTD, cache=cache)
        remember(cache, {"k": k, "v": v, "log_decay": log_decay})
        if further is not None:
            k, v, log_decay = (cache.tensors[name][:, : further.length] for name in ("k", "v", "log_decay"))
            o = forgetting_attention(further.spread(q), k.to(q.dtype), v.to(q.dtype), log_decay)
            return self._finish(further.pick(o), x_BTD)
        for t, q_B1HK in enumerate(q.split(1, dim=1)):
            seen = cache.length - q.shape[1] + t + 1
            k, v, log_decay = (cache.tensors[name][:, :seen] for name in ("k", "v", "log_decay"))
            visible = None if cache.lengths is None else torch.arange(seen, device=k.device) <= start + t
            o = forgetting_attention_step(q_B1HK, k.to(q.dtype), v.to(q.dtype), log_decay, visible_BS=visible)
            outputs.append(o)
        return self._finish(torch.cat(outputs, dim=1), x_BTD)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the attention distribution, gates included, over the (shifted) values."""
        q, k, _, log_decay = self._inputs(x_BTD)
        return influence(q, k, log_decay)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and the outputs of attention."""
        q, k, v, log_decay = self._inputs(x_BTD)
        return v, forgetting_attention(q, k, v, log_decay)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official: every matrix normal(0.02), the bias of the forget gates 0, gains 1."""
        gains = {"q_gain": self.q_gain, "k_gain": self.k_gain, "norm_weight": self.norm_weight}
        own = {name: ParameterRecipe(init=constant(1.0), decay=False) for name, x in gains.items() if x is not None}
        return default_recipe(self) | own

    def flops(self, length: int) -> float:
        """Projections plus the causal half of the score and value products, of closed keys too."""
        weights = sum(layer.weight.numel() for layer in self.children() if isinstance(layer, nn.Linear))
        return 2.0 * length * weights + 2.0 * length * (length + 1) * self.layer.hidden

    def state_bytes(self, length: int) -> int:
        """Keys, values and gates of every token, and the last key and value before a shift."""
        itemsize, hidden = self.out.weight.element_size(), self.layer.hidden
        last = 0 if self.shift is None else 2 * hidden * itemsize
        return length * (2 * hidden * itemsize + self.heads * max(itemsize, 4)) + last
