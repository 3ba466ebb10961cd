"""Gated DeltaNet (arXiv 2412.06464): the delta rule with one decay of the memory per head and token."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import (
    LayerChoice,
    MixerConfig,
    Variant,
    choose_heads,
    divide,
    hybrid,
    mixer,
)
from basecap.mixers._delta import EPS, REPOSITORY, SHRUNK, DeltaMemory, DeltaMixer
from basecap.mixers._parts import rms_norm
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, normal, residual_std
from basecap.mixers._state_space import log_of_uniform, step_size, step_size_bias
from basecap.mixers.attention import Attention


@mixer(
    "gated-deltanet",
    backbone="swiglu",
    paper="arXiv 2412.06464",
    summary="delta rule with one data-dependent decay per head, short convolutions, gated norm",
    source=f"{REPOSITORY}: fla/models/gated_deltanet/modeling_gated_deltanet.py, fla/layers/gated_deltanet.py",
    differences=(
        "24 blocks at width 2048, as many as the other architectures; fla's default is 21.",
        "A is drawn from (1e-4, 16), not from (0, 16): 0 has no logarithm.",
    ),
    variants={
        "gated-deltanet canon": Variant(
            canon="acd",
            summary="with Canon layers at three places, besides its own convolution",
            paper="arXiv 2412.06464, ssrn 5240330 (Canon layers)",
        ),
        "gated-deltanet w/o conv": Variant(
            options={"conv": False}, summary="without the short convolutions", differences=SHRUNK
        ),
    },
)
class GatedDeltaNet(DeltaMixer):
    """The Gated DeltaNet mixer: gated delta rule, norm of each head's output, output gate, projection."""

    class Config(MixerConfig):
        """Options of Gated DeltaNet."""

        heads: int | None = Field(None, ge=1, description="heads; 3/4 hidden / 96 when not given")
        key_heads: int | None = Field(
            None, ge=1, description="heads of queries and keys, each shared by as many heads; heads when not given"
        )
        head_dim: int | None = Field(None, ge=1, description="key size per head; 3/4 hidden / heads when not given")
        value_expand: int = Field(2, ge=1, description="value channels per key channel")
        conv: bool = Field(True, description="whether short convolutions precede the delta rule")
        conv_width: int = Field(4, ge=1, description="tokens the short convolutions see")
        negative: bool = Field(False, description="writing strengths up to 2, so that the memory may change its sign")

    sizes: ClassVar = {768: {"heads": 6, "head_dim": 96}, 2048: {"heads": 6, "head_dim": 256}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        keys = max(1, 3 * layer.hidden // 4)
        heads = config.heads or choose_heads(keys, None, head_dim=96)
        key_dim = config.head_dim or divide(keys, heads, "3/4 of the hidden size by heads")
        value_dim = config.value_expand * key_dim
        width = config.conv_width if config.conv else None
        strongest = 2.0 if config.negative else 1.0
        self.memory = DeltaMemory(layer.hidden, heads, key_dim, value_dim, width, strongest, key_heads=config.key_heads)
        self.decay = nn.Linear(layer.hidden, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.gate = nn.Linear(layer.hidden, heads * value_dim, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(value_dim))
        self.out = nn.Linear(heads * value_dim, layer.hidden, bias=False)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """Return [B, T, H], in float32 or wider: -A softplus(W x + b), Mamba-2's parametrisation."""
        dt = step_size(self.decay(x_BTD), self.dt_bias)
        return -self.A_log.to(dt.dtype).exp() * dt

    def finish(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Normalise each head, gate, project."""
        normed = rms_norm(o_BTHV, EPS) * self.norm_weight.to(o_BTHV.dtype)
        return self.out(normed.flatten(2) * F.silu(self.gate(x_BTD)))

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official (fla's _init_weights): normal(0.02), convolutions too; norms 1; A in (0, 16), dt in [1e-3, 0.1]."""
        projection = ParameterRecipe(init=normal(0.02))
        return {
            **{f"memory.{name}": recipe for name, recipe in self.memory.recipe().items()},
            "decay.weight": projection,
            "gate.weight": projection,
            "A_log": ParameterRecipe(init=log_of_uniform(1e-4, 16.0), decay=False),
            "dt_bias": ParameterRecipe(init=step_size_bias(), decay=False),
            "norm_weight": ParameterRecipe(init=constant(1.0), decay=False),
            "out.weight": ParameterRecipe(init=normal(0.02 if self.config.conv else residual_std(self.layer))),
        }

    def flops(self, length: int) -> float:
        """The memory with its decay (K V per head and token), and the projections of decay, gate and output."""
        weights = self.decay.weight.numel() + self.gate.weight.numel() + self.out.weight.numel()
        fading = self.memory.heads * self.memory.key_dim * self.memory.value_dim
        return self.memory.flops(length) + length * (2.0 * weights + fading)


_SIGNED = LayerChoice(mixer=GatedDeltaNet, options={"negative": True})

hybrid(
    "olmo-hybrid",
    layers=(_SIGNED, _SIGNED, _SIGNED, LayerChoice(mixer=Attention, options={"position": "none"})),
    backbone="swiglu",
    paper="arXiv 2412.06464 (Gated DeltaNet), arXiv 2411.12537 (negative eigenvalues)",
    summary="of four layers, three of Gated DeltaNet with negative eigenvalues, one of attention without positions",
    source="allenai/OLMo-core@fa6c501: src/scripts/official/OLMo-hybrid/OLMo-hybrid-7B-pretrain.py",
    differences=(
        "Every block normalises its inputs; Olmo Hybrid normalises the outputs of blocks with attention.",
        "Queries and keys of the attention are not normalised.",
    ),
)

_PLAIN = LayerChoice(mixer=GatedDeltaNet)
_GATED = {"gate": "elementwise", "qk_norm": True, "qk_gain": True, "rotary_fraction": 0.25}

hybrid(
    "qwen3-next",
    layers=(_PLAIN, _PLAIN, _PLAIN, LayerChoice(mixer=Attention, options=_GATED)),
    backbone="swiglu",
    paper="arXiv 2412.06464 (Gated DeltaNet), arXiv 2505.06708 (gated attention)",
    summary="of four layers, three of Gated DeltaNet and one of gated attention with RoPE on a quarter of each head",
    source="huggingface/transformers@008e574: src/transformers/models/qwen3_next/configuration_qwen3_next.py",
    differences=(
        "Every layer has a dense SwiGLU, where Qwen3-Next has experts; heads have the sizes of gated-deltanet and "
        "transformer++, with keys and values of their own.",
        "Gains of norms are not centred at zero, which matters for weight decay alone; gains do not decay here.",
    ),
)
