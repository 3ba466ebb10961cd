"""DeltaNet (arXiv 2406.06484): linear attention that corrects what it stored under a key instead of adding to it."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import MixerConfig, Variant, choose_heads, divide, mixer
from basecap.mixers._delta import EPS, REPOSITORY, SHRUNK, DeltaMemory, DeltaMixer
from basecap.mixers._parts import rms_norm
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, normal, residual_std


@mixer(
    "deltanet",
    backbone="swiglu",
    paper="arXiv 2406.06484",
    summary="linear attention that overwrites by the delta rule, short convolutions, normalised output",
    source=f"{REPOSITORY}: fla/models/delta_net/modeling_delta_net.py, fla/layers/delta_net.py",
    variants={
        "deltanet w/o conv": Variant(
            options={"conv": False}, summary="without the short convolutions", differences=SHRUNK
        )
    },
)
class DeltaNet(DeltaMixer):
    """The DeltaNet mixer: delta rule, norm of each head's output, projection."""

    class Config(MixerConfig):
        """Options of DeltaNet."""

        heads: int | None = Field(None, ge=1, description="heads; hidden / 96 when not given")
        conv: bool = Field(True, description="whether short convolutions precede the delta rule")
        conv_width: int = Field(4, ge=1, description="tokens the short convolutions see")

    sizes: ClassVar = {768: {"heads": 8}, 2048: {"heads": 16}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        heads = choose_heads(layer.hidden, config.heads, head_dim=96)
        head_dim = divide(layer.hidden, heads, "hidden size by heads")
        self.memory = DeltaMemory(layer.hidden, heads, head_dim, head_dim, config.conv_width if config.conv else None)
        self.norm_weight = nn.Parameter(torch.empty(head_dim))
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def log_decay(self, x_BTD: Tensor) -> None:
        """Nothing decays."""

    def finish(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Normalise each head, project."""
        return self.out((rms_norm(o_BTHV, EPS) * self.norm_weight.to(o_BTHV.dtype)).flatten(2))

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official (fla's _init_weights): normal(0.02), convolutions and output projection too; norms 1."""
        return {
            **{f"memory.{name}": recipe for name, recipe in self.memory.recipe().items()},
            "norm_weight": ParameterRecipe(init=constant(1.0), decay=False),
            "out.weight": ParameterRecipe(init=normal(0.02 if self.config.conv else residual_std(self.layer))),
        }

    def flops(self, length: int) -> float:
        """The memory and the output projection."""
        return self.memory.flops(length) + 2.0 * length * self.out.weight.numel()
