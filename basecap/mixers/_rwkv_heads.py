"""Shared by the RWKV generations with heads: their state, and the layer that RWKV-5 and RWKV-6 have in common.

Sources: RWKV-5 and RWKV-6 arXiv 2404.05892, RWKV-7 arXiv 2503.14456.
"""

import math
from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers._contract import MixerConfig, choose_heads
from basecap.mixers._recipes import Initialiser, LayerSpec, ParameterRecipe, constant, orthogonal, values
from basecap.mixers._rwkv import TimeMix, mixing_share, ramp, shift_delta
from basecap.ops import Influence
from basecap.ops.wkv6 import influence, wkv6

#: Epsilon of the norm per head: 1e-5 on outputs divided by 8 (RWKV-5), the same as 64e-5 on the outputs.
EPS = 64e-5


class HeadNorm(nn.GroupNorm):
    """Normalise each head of [B, T, H * V] separately, with a gain and a bias per channel."""

    def __init__(self, heads: int, width: int):
        if width == heads:
            raise ConfigError(f"each head needs at least 2 channels; choose fewer than {heads} heads.")
        super().__init__(heads, width, eps=EPS)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalise; keeps shape and dtype."""
        return super().forward(x_BTD.flatten(0, 1)).view_as(x_BTD).to(x_BTD.dtype)


class HeadedConfig(MixerConfig):
    """Options of every generation with heads."""

    heads: int | None = Field(None, ge=1, description="heads; hidden / 64 when not given")


class HeadedTimeMix(TimeMix):
    """RWKV-5 and later: the state of a head is a matrix [K, V], with K = V."""

    sizes: ClassVar = {768: {"heads": 12}, 2048: {"heads": 32}}

    def __init__(self, config: HeadedConfig, layer: LayerSpec):
        super().__init__(config, layer)
        self.heads = choose_heads(layer.hidden, config.heads)
        self.head_dim = layer.hidden // self.heads

    def split(self, x_BTD: Tensor) -> Tensor:
        """Return the channels of each head, [B, T, H, K]."""
        return x_BTD.unflatten(-1, (self.heads, -1))

    def empty_state(self, batch: int) -> Tensor:
        """[batch, H, K, V], in float32 or wider."""
        like = next(self.parameters())
        dtype = torch.promote_types(like.dtype, torch.float32)
        return like.new_zeros(batch, self.heads, self.head_dim, self.head_dim, dtype=dtype)

    def norm_recipe(self) -> dict[str, ParameterRecipe]:
        """Recipe of `norm`: a gain of ((1 + index) / depth)^0.7, larger in deeper layers, and no bias."""
        gain = ((1 + self.layer.index) / self.layer.depth) ** 0.7
        return {
            "norm.weight": ParameterRecipe(init=constant(gain), decay=False),
            "norm.bias": ParameterRecipe(init=constant(0.0), decay=False),
        }


class Shifted(NamedTuple):
    """What the token shift gives the recurrence.

    Attributes:
        g, r, k, v: inputs of the gate, the receptance, the keys and the values, [B, T, D] each.
        log_decay: [B, T, H, K] or [1, 1, H, K], in float32 or wider.
    """

    g: Tensor
    r: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor


class GatedTimeMix(HeadedTimeMix):
    """output(norm(wkv) * silu(gate)): RWKV-5 and RWKV-6, which differ in token shift and decay."""

    def build_projections(self) -> None:
        """Build the bonus, the projections and the norm; call it last, since a checkpoint keeps the order."""
        D = self.layer.hidden
        self.bonus = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.receptance = nn.Linear(D, D, bias=False)
        self.key = nn.Linear(D, D, bias=False)
        self.value = nn.Linear(D, D, bias=False)
        self.gate = nn.Linear(D, D, bias=False)
        self.output = nn.Linear(D, D, bias=False)
        self.norm = HeadNorm(self.heads, D)

    @abstractmethod
    def shift(self, x_BTD: Tensor, delta_BTD: Tensor) -> Shifted:
        """Mix each token with the previous one; `delta_BTD` is previous minus present token."""

    def _recur(self, shifted: Shifted, state: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return values and outputs of the recurrence [B, T, H, V] and its final state."""
        r, k = self.split(self.receptance(shifted.r)), self.split(self.key(shifted.k))
        v = self.split(self.value(shifted.v))
        return v, *wkv6(r, k, v, shifted.log_decay, self.bonus, state_BHKV=state, segments=segments)

    def mix(
        self,
        x_BTD: Tensor,
        delta_BTD: Tensor,
        state: Tensor | None,
        segments: Tensor | None,
        shared: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence, normalise, gate; see `TimeMix.mix`."""
        shifted = self.shift(x_BTD, delta_BTD)
        _, o, state = self._recur(shifted, state, segments)
        return self.output(self.norm(o.flatten(2)) * F.silu(self.gate(shifted.g))), state

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the factor in front of v_s in the recurrence's output (before norm and gate)."""
        shifted = self.shift(x_BTD, shift_delta(x_BTD, None))
        r, k = self.split(self.receptance(shifted.r)), self.split(self.key(shifted.k))
        return influence(r, k, shifted.log_decay, self.bonus)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and outputs of the recurrence, [B, T, H, V]."""
        v, o, _ = self._recur(self.shift(x_BTD, shift_delta(x_BTD, None)), None, None)
        return v, o

    def gated_recipe(self, rise: float, fall: float) -> dict[str, ParameterRecipe]:
        """Recipe of what both generations have: orthogonal projections, small key and gate, output zero.

        `rise` and `fall` are the `depth_ratios` of the layer.
        """
        D = self.layer.hidden
        return {
            "share_k": mixing_share(D, fall),
            "share_v": mixing_share(D, fall, 0.3 * rise),
            "share_r": mixing_share(D, 0.5 * fall),
            "share_g": mixing_share(D, 0.5 * fall),
            "bonus": ParameterRecipe(init=_first_bonus(self.bonus.shape, rise), decay=False),
            "receptance.weight": ParameterRecipe(init=orthogonal()),
            "key.weight": ParameterRecipe(init=orthogonal(0.1)),
            "value.weight": ParameterRecipe(init=orthogonal()),
            "gate.weight": ParameterRecipe(init=orthogonal(0.1)),
            "output.weight": ParameterRecipe(init=constant(0.0)),
            **self.norm_recipe(),
        }


def decay_speed(shape: tuple[int, ...], rise: float) -> Initialiser:
    """Initial log(-log decay) of RWKV-5 and RWKV-6, channel by channel, for a layer at `rise` in 0..1 of the depth."""
    power = 0.7 + 1.3 * rise
    speeds = -6.0 + 5.0 * ramp(math.prod(shape)) ** power
    return values(speeds.view(shape), f"-6 + 5 (i/(D-1))^{power:.3g}")


def _first_bonus(shape: tuple[int, ...], rise: float) -> Initialiser:
    """Initial weight of the present token, channel by channel."""
    width = math.prod(shape)
    zigzag = ((torch.arange(width) + 1) % 3 - 1) * 0.1
    weights = rise * (1.0 - ramp(width)) + zigzag
    return values(weights.view(shape), f"{rise:.2g} (1 - i/(D-1)), and by turns 0, 0.1, -0.1")
