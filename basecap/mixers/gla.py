"""Gated linear attention (arXiv 2312.06635): a linear memory with a data-dependent decay per channel of the keys."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import MixerConfig, divide, mixer
from basecap.mixers._delta import REPOSITORY
from basecap.mixers._linear_memory import EPS, OWN_EPS, Inputs, LinearMemory
from basecap.mixers._parts import check_rank, rms_norm
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, default_recipe

#: Logarithms of the decays are divided by it.
SLOWER = 16.0


@mixer(
    "gla",
    backbone="swiglu",
    paper="arXiv 2312.06635",
    summary="linear attention with a data-dependent decay per channel, gated norm",
    source=f"{REPOSITORY}: fla/layers/gla.py, fla/models/gla/modeling_gla.py",
    differences=(OWN_EPS,),
)
class GatedLinearAttention(LinearMemory):
    """The GLA mixer: gated linear attention, norm of each head's output, output gate, projection."""

    class Config(MixerConfig):
        """Options of gated linear attention."""

        heads: int = Field(4, ge=1, description="heads")
        rank: int = Field(16, ge=1, description="rank of the map to the decays")

    sizes: ClassVar = {768: {"heads": 4}, 2048: {"heads": 4}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.heads = config.heads
        half = divide(layer.hidden, 2, "hidden size in two, for keys")
        self.key_dim = divide(half, self.heads, "half the hidden size by heads")
        self.value_dim = 2 * self.key_dim
        check_rank("rank", config.rank, layer.hidden)
        keys = self.heads * self.key_dim
        self.qkv = nn.Linear(layer.hidden, 2 * keys + layer.hidden, bias=False)
        self.decay_down = nn.Linear(layer.hidden, config.rank, bias=False)
        self.decay_up = nn.Linear(config.rank, keys)
        self.gate = nn.Linear(layer.hidden, layer.hidden, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(self.value_dim))
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def inputs(self, x_BTD: Tensor, start: int | Tensor, segments: Tensor | None) -> Inputs:
        """Return q, k, v and log decays logsigmoid(W_up W_down x + b) / 16; see `LinearMemory.inputs`."""
        keys = self.heads * self.key_dim
        q, k, v = self.qkv(x_BTD).split([keys, keys, self.layer.hidden], dim=-1)
        raw = self.decay_up(self.decay_down(x_BTD))
        log_decay = F.logsigmoid(raw.to(torch.promote_types(raw.dtype, torch.float32))) / SLOWER
        q, k, v, log_decay = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v, log_decay))
        return q * self.key_dim**-0.5, k, v, log_decay

    def finish(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Normalise each head, gate, project."""
        normed = rms_norm(o_BTHV, EPS) * self.norm_weight.to(o_BTHV.dtype)
        return self.out(normed.flatten(2) * F.silu(self.gate(x_BTD)))

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official (fla's _init_weights): normal(0.02), bias 0, gain 1."""
        return {**default_recipe(self), "norm_weight": ParameterRecipe(init=constant(1.0), decay=False)}
