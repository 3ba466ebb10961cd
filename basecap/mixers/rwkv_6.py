"""RWKV-6 (arXiv 2404.05892): RWKV-5 whose decays and token shifts depend on the data through low-rank maps."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import MixerConfig, choose_heads, mixer
from basecap.mixers._layer import LayerSpec
from basecap.mixers._recipes import ParameterRecipe, constant, uniform
from basecap.mixers._rwkv import (
    REPOSITORY,
    HeadNorm,
    LowRank,
    TimeMix,
    decay_speed,
    depth_ratios,
    first_bonus,
    gated_recipe,
    matrix_state,
    mixing_share,
    prefixed,
    shift_delta,
)
from basecap.ops import Influence
from basecap.ops.wkv6 import influence, wkv6

#: Inputs computed by the token shift, in the order of the stacked parameters.
FED = ("w", "k", "v", "r", "g")


@mixer(
    "rwkv-6",
    backbone="rwkv-6",
    paper="arXiv 2404.05892",
    summary="linear attention with a data-dependent decay per channel and token shift, norm per head, gate",
    source=f"{REPOSITORY}: RWKV-v5/src/model.py",
    differences=(
        "The shares of channel mixing have the power 3 that the trainer gives them since 2024-11-17 (b44816c6); models "
        "published before have the power 1.",
    ),
)
class RWKV6(TimeMix):
    """output(norm(wkv) * silu(gate)), with data-dependent decays and shares of the previous token."""

    class Config(MixerConfig):
        """Options of RWKV-6."""

        heads: int | None = Field(None, ge=1, description="heads; hidden / 64 when not given")
        mix_rank: int = Field(32, ge=1, description="rank of each of the five maps to the token-shift shares")
        decay_rank: int = Field(64, ge=1, description="rank of the map to the decays")

    sizes: ClassVar = {768: {"heads": 12}, 2048: {"heads": 32}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        D = layer.hidden
        self.heads = choose_heads(D, config.heads)
        self.head_dim = D // self.heads
        self.share_x = nn.Parameter(torch.empty(D))
        self.share_w = nn.Parameter(torch.empty(D))
        self.share_k = nn.Parameter(torch.empty(D))
        self.share_v = nn.Parameter(torch.empty(D))
        self.share_r = nn.Parameter(torch.empty(D))
        self.share_g = nn.Parameter(torch.empty(D))
        self.mix_down = nn.Parameter(torch.empty(D, len(FED) * config.mix_rank))
        self.mix_up = nn.Parameter(torch.empty(len(FED), config.mix_rank, D))
        self.decay = LowRank(D, config.decay_rank, D, torch.tanh)
        self.bonus = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.receptance = nn.Linear(D, D, bias=False)
        self.key = nn.Linear(D, D, bias=False)
        self.value = nn.Linear(D, D, bias=False)
        self.gate = nn.Linear(D, D, bias=False)
        self.output = nn.Linear(D, D, bias=False)
        self.norm = HeadNorm(self.heads, D)

    def _shifted(self, x_BTD: Tensor, delta_BTD: Tensor) -> list[Tensor]:
        """Return the inputs [B, T, D] of w, k, v, r and g."""
        low = torch.tanh((x_BTD + delta_BTD * self.share_x) @ self.mix_down).unflatten(-1, (len(FED), -1))
        learned = torch.stack([self.share_w, self.share_k, self.share_v, self.share_r, self.share_g])
        shares_BTFD = learned + torch.einsum("btfr,frd->btfd", low, self.mix_up)
        return [x_BTD + delta_BTD * part for part in shares_BTFD.unbind(2)]

    def _project(self, w_in: Tensor, k_in: Tensor, r_in: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return r, k and the log decays, each [B, T, H, K]."""
        w = self.decay(w_in)
        log_decay = -w.to(torch.promote_types(w.dtype, torch.float32)).exp()
        r, k, log_decay = (
            x.unflatten(-1, (self.heads, -1)) for x in (self.receptance(r_in), self.key(k_in), log_decay)
        )
        return r, k, log_decay

    def empty_state(self, batch: int) -> Tensor:
        """[batch, H, K, V]."""
        return matrix_state(self.bonus, batch, self.heads, self.head_dim)

    def _recur(
        self, inputs: list[Tensor], state: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return values and outputs of the recurrence [B, T, H, V] and its final state; `inputs` of w, k, v, r."""
        w_in, k_in, v_in, r_in = inputs
        r, k, log_decay = self._project(w_in, k_in, r_in)
        v = self.value(v_in).unflatten(-1, (self.heads, -1))
        return v, *wkv6(r, k, v, log_decay, self.bonus, state_BHKV=state, segments=segments)

    def mix(
        self,
        x_BTD: Tensor,
        delta_BTD: Tensor,
        state: Tensor | None,
        segments: Tensor | None,
        shared: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence, normalise, gate; see `TimeMix.mix`."""
        *inputs, gate_in = self._shifted(x_BTD, delta_BTD)
        _, o, state = self._recur(inputs, state, segments)
        return self.output(self.norm(o.flatten(2)) * F.silu(self.gate(gate_in))), state

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the factor in front of v_s in the recurrence's output (before norm and gate)."""
        w_in, k_in, _, r_in, _ = self._shifted(x_BTD, shift_delta(x_BTD, None))
        r, k, log_decay = self._project(w_in, k_in, r_in)
        return influence(r, k, log_decay, self.bonus)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and outputs of the recurrence, [B, T, H, V]."""
        v, o, _ = self._recur(self._shifted(x_BTD, shift_delta(x_BTD, None))[:-1], None, None)
        return v, o

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official: as RWKV-5, the low-rank maps start at zero, without weight decay."""
        layer, D = self.layer, self.layer.hidden
        rise, fall = depth_ratios(layer.index, layer.depth)
        small = uniform(-0.01, 0.01)
        return {
            "share_x": mixing_share(D, fall),
            "share_w": mixing_share(D, fall),
            "share_k": mixing_share(D, fall),
            "share_v": mixing_share(D, fall, 0.3 * rise),
            "share_r": mixing_share(D, 0.5 * fall),
            "share_g": mixing_share(D, 0.5 * fall),
            "mix_down": ParameterRecipe(init=constant(0.0), decay=False),
            "mix_up": ParameterRecipe(init=small, decay=False),
            "bonus": ParameterRecipe(init=first_bonus(self.bonus.shape, rise), decay=False),
            **prefixed("decay", self.decay.recipe(small, decay_speed((D,), rise), lr=2.0)),
            **gated_recipe(layer),
        }

    def flops(self, length: int) -> float:
        """Projections, low-rank maps and the recurrence (write 2, read 2, decay 1: 5 K V per head and token)."""
        D = self.layer.hidden
        weights = 5 * D * D + self.mix_down.numel() + self.mix_up.numel()
        return length * (2.0 * weights + 5.0 * D * self.head_dim) + self.decay.flops(length)
