"""RWKV-5 (arXiv 2404.05892): linear attention with a constant decay per channel, a norm per head and a gate."""

import torch
from torch import Tensor, nn

from basecap.mixers._contract import mixer
from basecap.mixers._recipes import LayerSpec, ParameterRecipe
from basecap.mixers._rwkv import REPOSITORY, depth_ratios
from basecap.mixers._rwkv_heads import GatedTimeMix, HeadedConfig, Shifted, decay_speed


@mixer(
    "rwkv-5",
    backbone="rwkv-5",
    paper="arXiv 2404.05892",
    summary="linear attention with a constant decay per channel, norm per head, gate",
    source=f"{REPOSITORY}: RWKV-v5/src/model.py",
)
class RWKV5(GatedTimeMix):
    """output(norm(wkv) * silu(gate)); the state of a head is a matrix, its decays are parameters."""

    class Config(HeadedConfig):
        """Options of RWKV-5."""

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        D = layer.hidden
        self.share_k = nn.Parameter(torch.empty(D))
        self.share_v = nn.Parameter(torch.empty(D))
        self.share_r = nn.Parameter(torch.empty(D))
        self.share_g = nn.Parameter(torch.empty(D))
        self.decay = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.build_projections()

    def shift(self, x_BTD: Tensor, delta_BTD: Tensor) -> Shifted:
        """Mix each token with the previous one by the learned shares; the decays are constant."""
        wide = torch.promote_types(self.decay.dtype, torch.float32)
        return Shifted(
            g=x_BTD + delta_BTD * self.share_g,
            r=x_BTD + delta_BTD * self.share_r,
            k=x_BTD + delta_BTD * self.share_k,
            v=x_BTD + delta_BTD * self.share_v,
            log_decay=-self.decay.to(wide).exp()[None, None],
        )

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official: decays by channel and depth (twice the learning rate), small key and gate, output zero."""
        rise, fall = depth_ratios(self.layer.index, self.layer.depth)
        return {
            "decay": ParameterRecipe(init=decay_speed(self.decay.shape, rise), lr=2.0, decay=False),
            **self.gated_recipe(rise, fall),
        }

    def flops(self, length: int) -> float:
        """Projections and the recurrence (write 2, read 2, decay 1: 5 K V per head and token)."""
        D = self.layer.hidden
        return length * (2.0 * 5 * D * D + 5.0 * D * self.head_dim)
