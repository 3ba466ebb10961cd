"""RWKV-6 (arXiv 2404.05892): RWKV-5 whose decays and token shifts depend on the data through low-rank maps."""

import torch
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import mixer
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, uniform
from basecap.mixers._rwkv import REPOSITORY, LowRank, depth_ratios, mixing_share, prefixed
from basecap.mixers._rwkv_heads import GatedTimeMix, HeadedConfig, Shifted, decay_speed
from basecap.ops import recomputed

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
class RWKV6(GatedTimeMix):
    """output(norm(wkv) * silu(gate)), with data-dependent decays and shares of the previous token."""

    class Config(HeadedConfig):
        """Options of RWKV-6."""

        mix_rank: int = Field(32, ge=1, description="rank of each of the five maps to the token-shift shares")
        decay_rank: int = Field(64, ge=1, description="rank of the map to the decays")

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        D = layer.hidden
        self.share_x = nn.Parameter(torch.empty(D))
        self.share_w = nn.Parameter(torch.empty(D))
        self.share_k = nn.Parameter(torch.empty(D))
        self.share_v = nn.Parameter(torch.empty(D))
        self.share_r = nn.Parameter(torch.empty(D))
        self.share_g = nn.Parameter(torch.empty(D))
        self.mix_down = nn.Parameter(torch.empty(D, len(FED) * config.mix_rank))
        self.mix_up = nn.Parameter(torch.empty(len(FED), config.mix_rank, D))
        self.decay = LowRank(D, config.decay_rank, D, torch.tanh)
        self.build_projections()

    def shift(self, x_BTD: Tensor, delta_BTD: Tensor) -> Shifted:
        """Mix each token with the previous one by shares that depend on both."""
        low = torch.tanh((x_BTD + delta_BTD * self.share_x) @ self.mix_down).unflatten(-1, (len(FED), -1))
        learned = torch.stack([self.share_w, self.share_k, self.share_v, self.share_r, self.share_g])

        def mixed() -> tuple[Tensor, ...]:
            shares_BTFD = learned + torch.einsum("btfr,frd->btfd", low, self.mix_up)
            return tuple(x_BTD + delta_BTD * share for share in shares_BTFD.unbind(2))

        w, k, v, r, g = recomputed(mixed, x_BTD.device)
        speed = self.decay(w)
        log_decay = -speed.to(torch.promote_types(speed.dtype, torch.float32)).exp()
        return Shifted(g=g, r=r, k=k, v=v, log_decay=self.split(log_decay))

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official: as RWKV-5, the low-rank maps start at zero, without weight decay."""
        D, small = self.layer.hidden, uniform(-0.01, 0.01)
        rise, fall = depth_ratios(self.layer.index, self.layer.depth)
        return {
            "share_x": mixing_share(D, fall),
            "share_w": mixing_share(D, fall),
            "mix_down": ParameterRecipe(init=constant(0.0), decay=False, matrix=True),
            "mix_up": ParameterRecipe(init=small, decay=False),
            **prefixed("decay", self.decay.recipe(small, decay_speed((D,), rise), lr=2.0)),
            **self.gated_recipe(rise, fall),
        }

    def flops(self, length: int) -> float:
        """Projections, low-rank maps and the recurrence (write 2, read 2, decay 1: 5 K V per head and token)."""
        D = self.layer.hidden
        weights = 5 * D * D + self.mix_down.numel() + self.mix_up.numel()
        return length * (2.0 * weights + 5.0 * D * self.head_dim) + self.decay.flops(length)
