"""RWKV-5 (arXiv 2404.05892): linear attention with a constant decay per channel, a norm per head and a gate."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import MixerConfig, choose_heads, mixer
from basecap.mixers._layer import LayerSpec
from basecap.mixers._recipes import ParameterRecipe
from basecap.mixers._rwkv import (
    REPOSITORY,
    HeadNorm,
    TimeMix,
    decay_speed,
    depth_ratios,
    first_bonus,
    gated_recipe,
    matrix_state,
    mixing_share,
    shift_delta,
)
from basecap.ops import Influence
from basecap.ops.wkv6 import influence, wkv6


@mixer(
    "rwkv-5",
    backbone="rwkv-5",
    paper="arXiv 2404.05892",
    summary="linear attention with a constant decay per channel, norm per head, gate",
    source=f"{REPOSITORY}: RWKV-v5/src/model.py",
)
class RWKV5(TimeMix):
    """output(norm(wkv) * silu(gate)); the state of a head is a matrix, its decays are parameters."""

    class Config(MixerConfig):
        """Options of RWKV-5."""

        heads: int | None = Field(None, ge=1, description="heads; hidden / 64 when not given")

    sizes: ClassVar = {768: {"heads": 12}, 2048: {"heads": 32}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        D = layer.hidden
        self.heads = choose_heads(D, config.heads)
        self.head_dim = D // self.heads
        self.share_k = nn.Parameter(torch.empty(D))
        self.share_v = nn.Parameter(torch.empty(D))
        self.share_r = nn.Parameter(torch.empty(D))
        self.share_g = nn.Parameter(torch.empty(D))
        self.decay = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.bonus = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.receptance = nn.Linear(D, D, bias=False)
        self.key = nn.Linear(D, D, bias=False)
        self.value = nn.Linear(D, D, bias=False)
        self.gate = nn.Linear(D, D, bias=False)
        self.output = nn.Linear(D, D, bias=False)
        self.norm = HeadNorm(self.heads, D)

    def _project(self, x_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return r, k [B, T, H, K] and the log decay [1, 1, H, K]."""
        r = self.receptance(x_BTD + delta_BTD * self.share_r)
        k = self.key(x_BTD + delta_BTD * self.share_k)
        wide = torch.promote_types(self.decay.dtype, torch.float32)
        log_decay = -self.decay.to(wide).exp()[None, None]
        return *(x.unflatten(-1, (self.heads, -1)) for x in (r, k)), log_decay

    def empty_state(self, batch: int) -> Tensor:
        """[batch, H, K, V]."""
        return matrix_state(self.decay, batch, self.heads, self.head_dim)

    def _recur(
        self, x_BTD: Tensor, delta_BTD: Tensor, state: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return values and outputs of the recurrence [B, T, H, V] and its final state."""
        r, k, log_decay = self._project(x_BTD, delta_BTD)
        v = self.value(x_BTD + delta_BTD * self.share_v).unflatten(-1, (self.heads, -1))
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
        gate = F.silu(self.gate(x_BTD + delta_BTD * self.share_g))
        _, o, state = self._recur(x_BTD, delta_BTD, state, segments)
        return self.output(self.norm(o.flatten(2)) * gate), state

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the factor in front of v_s in the recurrence's output (before norm and gate)."""
        r, k, log_decay = self._project(x_BTD, shift_delta(x_BTD, None))
        return influence(r, k, log_decay, self.bonus)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and outputs of the recurrence, [B, T, H, V]."""
        v, o, _ = self._recur(x_BTD, shift_delta(x_BTD, None), None, None)
        return v, o

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official: decays by channel and depth (twice the learning rate), small key and gate, output zero."""
        layer, D, shape = self.layer, self.layer.hidden, self.decay.shape
        rise, fall = depth_ratios(layer.index, layer.depth)
        return {
            "share_k": mixing_share(D, fall),
            "share_v": mixing_share(D, fall, 0.3 * rise),
            "share_r": mixing_share(D, 0.5 * fall),
            "share_g": mixing_share(D, 0.5 * fall),
            "decay": ParameterRecipe(init=decay_speed(shape, rise), lr=2.0, decay=False),
            "bonus": ParameterRecipe(init=first_bonus(shape, rise), decay=False),
            **gated_recipe(layer),
        }

    def flops(self, length: int) -> float:
        """Projections and the recurrence (write 2, read 2, decay 1: 5 K V per head and token)."""
        D = self.layer.hidden
        return length * (2.0 * 5 * D * D + 5.0 * D * self.head_dim)
