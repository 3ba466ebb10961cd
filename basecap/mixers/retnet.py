"""RetNet's retention (arXiv 2307.08621): a linear memory with rotary positions and one fixed decay per head."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import MixerConfig, divide, mixer
from basecap.mixers._delta import REPOSITORY
from basecap.mixers._linear_memory import EPS, OWN_EPS, Inputs, LinearMemory
from basecap.mixers._parts import positions_of, refuse_odd_heads, rms_norm, rotary
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, default_recipe, normal, residual_std

#: Base of the rotary frequencies.
ROPE_BASE = 10_000.0


@mixer(
    "retnet",
    backbone="swiglu half",
    paper="arXiv 2307.08621",
    summary="retention: linear attention with rotary positions and a fixed decay per head, gated norm",
    source=f"{REPOSITORY}: fla/layers/multiscale_retention.py, fla/models/retnet/modeling_retnet.py",
    differences=(
        "The output projection is shrunk with depth: at fla's std 0.02 twelve blocks amplify gradients 14-fold.",
        OWN_EPS,
    ),
)
class Retention(LinearMemory):
    """The RetNet mixer: retention, norm of each head's output, output gate, projection."""

    class Config(MixerConfig):
        """Options of retention."""

        heads: int = Field(8, ge=1, description="heads; head h keeps 1 - 2^(-5-h) of its memory at each token")

    sizes: ClassVar = {768: {"heads": 8}, 2048: {"heads": 8}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.heads = config.heads
        self.key_dim = divide(layer.hidden, self.heads, "hidden size by heads")
        refuse_odd_heads(self.key_dim, self.heads)
        self.value_dim = 2 * self.key_dim
        self.qkv = nn.Linear(layer.hidden, 4 * layer.hidden, bias=False)
        self.gate = nn.Linear(layer.hidden, 2 * layer.hidden, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(self.value_dim))
        self.out = nn.Linear(2 * layer.hidden, layer.hidden, bias=False)

    def inputs(self, x_BTD: Tensor, start: int | Tensor, segments: Tensor | None) -> Inputs:
        """Return rotated q and k, v and the fixed log decays; see `LinearMemory.inputs`."""
        D = self.layer.hidden
        q, k, v = self.qkv(x_BTD).split([D, D, 2 * D], dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        positions = start + torch.arange(x_BTD.shape[1], device=x_BTD.device)
        if segments is not None:
            positions = positions_of(segments)
        q, k = (rotary(part, positions, ROPE_BASE) for part in (q, k))
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        lost_H = torch.exp2(-5.0 - torch.arange(self.heads, device=x_BTD.device, dtype=wide))
        return q * self.key_dim**-0.5, k, v, torch.log1p(-lost_H).expand(*x_BTD.shape[:2], -1)

    def finish(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Normalise each head, gate, project."""
        normed = rms_norm(o_BTHV, EPS) * self.norm_weight.to(o_BTHV.dtype)
        return self.out(normed.flatten(2) * F.silu(self.gate(x_BTD)))

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Fla's _init_weights, normal(0.02) and gain 1, but for the output projection, which is shrunk with depth."""
        return {
            **default_recipe(self),
            "norm_weight": ParameterRecipe(init=constant(1.0), decay=False),
            "out.weight": ParameterRecipe(init=normal(residual_std(self.layer))),
        }
