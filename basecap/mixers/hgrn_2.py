"""HGRN-2 (arXiv 2404.07904): a gated linear memory whose keys are what its forget gates let go."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import MixerConfig, choose_heads, divide, mixer
from basecap.mixers._delta import REPOSITORY
from basecap.mixers._linear_memory import EPS, Inputs, LinearMemory
from basecap.mixers._parts import rms_norm
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, default_recipe


@mixer(
    "hgrn-2",
    backbone="swiglu",
    paper="arXiv 2404.07904",
    summary="linear memory with keys of one minus the forget gates, which have lower bounds that rise with depth",
    source=f"{REPOSITORY}: fla/layers/hgrn2.py, fla/models/hgrn2/modeling_hgrn2.py",
    differences=(
        "Each layer learns a lower bound of its own, which starts at index / depth as the official one does. In the "
        "official model the bounds of all layers are running sums of one softmax over the layers, so that they can "
        "only rise; a mixer here has parameters of its own layer only, by which its influence is computed.",
    ),
)
class HGRN2(LinearMemory):
    """The HGRN-2 mixer: gated linear memory, norm of the output, projection."""

    class Config(MixerConfig):
        """Options of HGRN-2."""

        heads: int | None = Field(None, ge=1, description="heads; hidden / 128 when not given")

    sizes: ClassVar = {768: {"heads": 6}, 2048: {"heads": 16}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.heads = config.heads or choose_heads(layer.hidden, None, head_dim=128)
        self.key_dim = self.value_dim = divide(layer.hidden, self.heads, "hidden size by heads")
        self.qfv = nn.Linear(layer.hidden, 3 * layer.hidden, bias=False)
        # The lower bound of the first layer is 0.
        self.bound = nn.Parameter(torch.empty(layer.hidden)) if layer.index else None
        self.norm_weight = nn.Parameter(torch.empty(layer.hidden))
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def inputs(self, x_BTD: Tensor, start: int | Tensor, segments: Tensor | None) -> Inputs:
        """Return q, k = 1 - f, v and log f of the forget gates f; see `LinearMemory.inputs`."""
        q, f, v = self.qfv(x_BTD).chunk(3, dim=-1)
        log_decay = F.logsigmoid(f.to(torch.promote_types(f.dtype, torch.float32)))
        if self.bound is not None:
            bound = self.bound.to(log_decay.dtype).sigmoid()
            log_decay = (bound + (1 - bound) * log_decay.exp()).log()
        k = -torch.expm1(log_decay).to(v.dtype)
        q, k, v, log_decay = (part.unflatten(-1, (self.heads, -1)) for part in (F.silu(q), k, v, log_decay))
        return q * self.key_dim**-0.5, k, v, log_decay

    def finish(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Normalise over all heads, project."""
        o_BTD = rms_norm(o_BTHV.flatten(2), EPS)
        return self.out(o_BTD * self.norm_weight.to(o_BTD.dtype))

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official (fla's _init_weights): normal(0.02), gain 1, and lower bounds in equal steps from layer to layer."""
        recipes = {**default_recipe(self), "norm_weight": ParameterRecipe(init=constant(1.0), decay=False)}
        if self.bound is not None:
            share = self.layer.index / max(self.layer.depth, self.layer.index + 1)
            recipes["bound"] = ParameterRecipe(init=constant(math.log(share / (1 - share))), decay=False)
        return recipes
