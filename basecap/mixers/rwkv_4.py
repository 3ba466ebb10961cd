"""RWKV-4 (arXiv 2305.13048): an exponentially decaying weighted average per channel, behind a receptance gate."""

import math

import torch
from torch import Tensor, nn

from basecap.mixers._contract import MixerConfig, mixer
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, orthogonal, values
from basecap.mixers._rwkv import REPOSITORY, TimeMix, depth_ratios, mixing_share, ramp, shift_delta
from basecap.ops import Influence
from basecap.ops.wkv4 import influence, wkv4


@mixer(
    "rwkv-4",
    backbone="rwkv-4",
    paper="arXiv 2305.13048",
    summary="decaying weighted average per channel, behind a receptance gate",
    source=f"{REPOSITORY}: RWKV-v4neo/src/model.py",
    differences=(
        "The embedding starts uniform in ±1e-4, as in the later trainers: RWKV-v4neo takes the peak learning rate as "
        "the bound, which a model does not know here; a LayerNorm follows in both.",
        "Channel mixing is 2 D wide, as in the 153M model of arXiv 2410.15678; RWKV-v4neo has 4 D by default.",
    ),
)
class RWKV4(TimeMix):
    """output(sigmoid(receptance) * average of the values, weighted by exp(key) and age)."""

    class Config(MixerConfig):
        """RWKV-4 has no options: every channel is a head."""

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        D = layer.hidden
        self.share_k = nn.Parameter(torch.empty(D))
        self.share_v = nn.Parameter(torch.empty(D))
        self.share_r = nn.Parameter(torch.empty(D))
        self.decay = nn.Parameter(torch.empty(D))
        self.bonus = nn.Parameter(torch.empty(D))
        self.key = nn.Linear(D, D, bias=False)
        self.value = nn.Linear(D, D, bias=False)
        self.receptance = nn.Linear(D, D, bias=False)
        self.output = nn.Linear(D, D, bias=False)

    def _rates(self) -> tuple[Tensor, Tensor]:
        """Return decay and bonus [D] in float32 or wider."""
        wide = torch.promote_types(self.decay.dtype, torch.float32)
        return self.decay.to(wide).exp(), self.bonus.to(wide)

    def empty_state(self, batch: int) -> Tensor:
        """(mean, logarithm of its weight): [batch, 2, D] of 0 and -inf."""
        dtype = torch.promote_types(self.decay.dtype, torch.float32)
        state = self.decay.new_zeros(batch, 2, self.layer.hidden, dtype=dtype)
        state[:, 1] = -math.inf
        return state

    def _average(
        self, x_BTD: Tensor, delta_BTD: Tensor, state: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return values and averages [B, T, D] and the final state."""
        k = self.key(x_BTD + delta_BTD * self.share_k)
        v = self.value(x_BTD + delta_BTD * self.share_v)
        return v, *wkv4(k, v, *self._rates(), state_B2D=state, segments=segments)

    def mix(
        self,
        x_BTD: Tensor,
        delta_BTD: Tensor,
        state: Tensor | None,
        segments: Tensor | None,
        shared: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Average and gate; see `TimeMix.mix`."""
        r = torch.sigmoid(self.receptance(x_BTD + delta_BTD * self.share_r))
        _, o, state = self._average(x_BTD, delta_BTD, state, segments)
        return self.output(r * o), state

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the weights of the averages of each channel (before the receptance)."""
        k = self.key(x_BTD + shift_delta(x_BTD, None) * self.share_k)
        return influence(k, *self._rates())

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and averages, [B, T, D, 1]."""
        v, o, _ = self._average(x_BTD, shift_delta(x_BTD, None), None, None)
        return v[..., None], o[..., None]

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official: channels from slow to fast decay (twice the learning rate), key, receptance and output zero."""
        D, layer = self.layer.hidden, self.layer
        rise, fall = depth_ratios(layer.index, layer.depth)
        decay = -5.0 + 8.0 * ramp(D) ** (0.7 + 1.3 * rise)
        bonus = math.log(0.3) + 0.5 * ((torch.arange(D) + 1) % 3 - 1)
        zero = ParameterRecipe(init=constant(0.0))
        return {
            "share_k": mixing_share(D, fall),
            "share_v": mixing_share(D, fall, 0.3 * rise),
            "share_r": mixing_share(D, 0.5 * fall),
            "decay": ParameterRecipe(init=values(decay, "-5 + 8 (i/(D-1))^p, p by depth"), lr=2.0, decay=False),
            "bonus": ParameterRecipe(init=values(bonus, "log 0.3, and by turns 0, 0.5, -0.5"), lr=3.0, decay=False),
            "key.weight": zero,
            "value.weight": ParameterRecipe(init=orthogonal()),
            "receptance.weight": zero,
            "output.weight": zero,
        }

    def flops(self, length: int) -> float:
        """Projections and about 12 operations per channel and token for the average."""
        D = self.layer.hidden
        return length * (2.0 * 4 * D * D + 12.0 * D)
