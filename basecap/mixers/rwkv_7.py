"""RWKV-7 (arXiv 2503.14456): decay per channel plus a delta rule whose removal keys and rates depend on the data."""

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import mixer
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, orthogonal, values
from basecap.mixers._rwkv import (
    REPOSITORY,
    LowRank,
    depth_ratios,
    mixing_share,
    prefixed,
    ramp,
    scaled_orthogonal,
    shift_delta,
)
from basecap.mixers._rwkv_heads import HeadedConfig, HeadedTimeMix, HeadNorm
from basecap.ops import Influence
from basecap.ops.wkv7 import influence, wkv7_bounded

#: Powers of the shares of the previous token at the first layer: they flatten with depth.
POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}

#: No channel forgets more than exp(-exp(-1/2)) = 0.545 of its state in one step.
FASTEST = math.exp(-0.5)


def rank(hidden: int, factor: float) -> int:
    """Return the official rank of a low-rank map: factor * sqrt(hidden), to the nearest multiple of 32, at least 32."""
    return max(32, 32 * round(factor * math.sqrt(hidden) / 32))


@mixer(
    "rwkv-7",
    backbone="rwkv-7",
    paper="arXiv 2503.14456",
    summary="decay per channel and a generalised delta rule, low-rank gates, values shared with the first layer",
    source=f"{REPOSITORY}: RWKV-v7/train_temp/src/model.py, RWKV-v7/train_temp/train.py",
    differences=(
        "The ranks of the low-rank maps follow the current trainer's formula at every width, which gives 128, 128, 64 "
        "and 224 at width 2048; the published 1.5B model is older and has 96, 96, 64 and 256.",
    ),
)
class RWKV7(HeadedTimeMix):
    """output((norm(wkv) + own value) * gate)."""

    class Config(HeadedConfig):
        """Options of RWKV-7; the ranks follow the width when not given (768: 64, 64, 32, 128)."""

        decay_rank: int | None = Field(None, ge=1, description="rank of the map to the decays")
        rate_rank: int | None = Field(None, ge=1, description="rank of the map to the in-context learning rates")
        value_rank: int | None = Field(None, ge=1, description="rank of the map to the first layer's share of values")
        gate_rank: int | None = Field(None, ge=1, description="rank of the map to the gate")

    takes_shared = True

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        D = layer.hidden
        self.share_r = nn.Parameter(torch.empty(D))
        self.share_w = nn.Parameter(torch.empty(D))
        self.share_k = nn.Parameter(torch.empty(D))
        self.share_v = nn.Parameter(torch.empty(D))
        self.share_a = nn.Parameter(torch.empty(D))
        self.share_g = nn.Parameter(torch.empty(D))
        self.decay = LowRank(D, config.decay_rank or rank(D, 2.5), D, torch.tanh)
        self.rate = LowRank(D, config.rate_rank or rank(D, 2.5), D)
        self.gate = LowRank(D, config.gate_rank or rank(D, 5.0), D, torch.sigmoid, base=False)
        # The first layer has no values of an earlier layer to mix in.
        self.first = LowRank(D, config.value_rank or rank(D, 1.7), D) if layer.index else None
        self.removal = nn.Parameter(torch.empty(D))
        self.replacement = nn.Parameter(torch.empty(D))
        self.bonus = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.receptance = nn.Linear(D, D, bias=False)
        self.key = nn.Linear(D, D, bias=False)
        self.value = nn.Linear(D, D, bias=False)
        self.output = nn.Linear(D, D, bias=False)
        self.norm = HeadNorm(self.heads, D)

    def _project(self, x_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return r, log decay, k, a and b of the recurrence, each [B, T, H, K]."""
        r = self.receptance(x_BTD + delta_BTD * self.share_r)
        w = self.decay(x_BTD + delta_BTD * self.share_w)
        k = self.key(x_BTD + delta_BTD * self.share_k)
        rate = torch.sigmoid(self.rate(x_BTD + delta_BTD * self.share_a))
        log_decay = -FASTEST * torch.sigmoid(w.to(torch.promote_types(w.dtype, torch.float32)))
        removed = F.normalize(self.split(k * self.removal).to(log_decay.dtype), dim=-1)
        k = self.split(k * (1 + (rate - 1) * self.replacement)).to(r.dtype)
        added = removed * self.split(rate)
        return self.split(r), self.split(log_decay), k, -removed, added

    def _values(self, x_BTD: Tensor, delta_BTD: Tensor, shared: dict[str, Tensor]) -> Tensor:
        """Return the values [B, T, H, V], mixed with those that the model's first RWKV-7 layer stored in `shared`."""
        v_in = x_BTD + delta_BTD * self.share_v
        v = self.value(v_in)
        first = shared.setdefault("rwkv-7 values", v)
        if self.first is not None:
            v = v + (first - v) * torch.sigmoid(self.first(v_in)).to(v.dtype)
        return self.split(v)

    def mix(
        self,
        x_BTD: Tensor,
        delta_BTD: Tensor,
        state: Tensor | None,
        segments: Tensor | None,
        shared: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence, normalise, add the present token's own value, gate; see `TimeMix.mix`."""
        r, log_decay, k, a, b = self._project(x_BTD, delta_BTD)
        v = self._values(x_BTD, delta_BTD, shared)
        o, state = wkv7_bounded(r, log_decay, k, v, a, b, state_BHKV=state, segments=segments)
        own = (r * k * self.bonus).sum(-1, keepdim=True) * v
        gate = self.gate(x_BTD + delta_BTD * self.share_g)
        return self.output((self.norm(o.flatten(2)) + own.flatten(2)) * gate), state

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the factor in front of v_s in the recurrence's output (before norm and own value)."""
        r, log_decay, k, a, b = self._project(x_BTD, shift_delta(x_BTD, None))
        return influence(r, log_decay, k, a, b)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (of a model's only layer) and outputs of the recurrence, [B, T, H, V]."""
        delta_BTD = shift_delta(x_BTD, None)
        r, log_decay, k, a, b = self._project(x_BTD, delta_BTD)
        v = self._values(x_BTD, delta_BTD, {})
        return v, wkv7_bounded(r, log_decay, k, v, a, b)[0]

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official: projections orthogonal, small key, output zero.

        Only the projections have weight decay; the decays have twice the learning rate.
        The official classes draw the projections uniformly; the trainer then overwrites them (generate_init_weight).
        """
        D, K, layer = self.layer.hidden, self.head_dim, self.layer
        rise, fall = depth_ratios(layer.index, layer.depth)
        line = ramp(D) - 0.5
        zigzag = 2.0 * ramp(K).repeat(self.heads) - 1.0
        zigzag = zigzag * zigzag.abs()
        decay = -5.5 + 6.0 * ramp(D) ** (1.0 + rise**0.3) + 2.5 * zigzag
        rate = -0.19 + 0.3 * zigzag + 0.4 * line
        up = scaled_orthogonal(0.1)
        recipes = {f"share_{name}": mixing_share(D, power * fall) for name, power in POWERS.items()}
        if self.first is not None:
            recipes |= prefixed("first", self.first.recipe(up, values(0.73 - 0.4 * line, "0.73 - 0.4 (i/(D-1) - 1/2)")))
        return recipes | {
            **prefixed("decay", self.decay.recipe(up, values(decay, "by channel, head and depth"), lr=2.0)),
            **prefixed("rate", self.rate.recipe(up, values(rate, "by channel and head, around -0.19"))),
            **prefixed("gate", self.gate.recipe(up)),
            "removal": ParameterRecipe(init=values(0.71 - 0.1 * line, "0.71 - 0.1 (i/(D-1) - 1/2)"), decay=False),
            "replacement": ParameterRecipe(init=constant(1.02), decay=False),
            "bonus": ParameterRecipe(init=constant(-0.04), decay=False),
            "receptance.weight": ParameterRecipe(init=orthogonal()),
            "key.weight": ParameterRecipe(init=orthogonal(0.1)),
            "value.weight": ParameterRecipe(init=orthogonal()),
            "output.weight": ParameterRecipe(init=constant(0.0)),
            **self.norm_recipe(),
        }

    def flops(self, length: int) -> float:
        """Projections, low-rank maps and the recurrence (recall, decay, two writes, read: 9 K V per head and token)."""
        D = self.layer.hidden
        maps = [self.decay, self.rate, self.gate] + ([] if self.first is None else [self.first])
        return length * (8.0 * D * D + 9.0 * D * self.head_dim) + sum(low.flops(length) for low in maps)
