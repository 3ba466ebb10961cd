"""Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay for each channel of the keys."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import LayerChoice, MixerConfig, Variant, choose_heads, divide, hybrid, mixer
from basecap.mixers._delta import EPS, REPOSITORY, DeltaMemory, DeltaMixer
from basecap.mixers._parts import rms_norm
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, constant, default_recipe, normal
from basecap.mixers._state_space import log_of_uniform, step_size, step_size_bias
from basecap.mixers.attention import Attention

PAPER = "arXiv 2510.26692"


@mixer(
    "kda",
    backbone="swiglu",
    paper=PAPER,
    summary="delta rule with a data-dependent decay per channel, short convolutions, gated norm",
    source=f"{REPOSITORY}: fla/layers/kda.py, fla/models/kda/modeling_kda.py, fla/ops/kda/naive.py",
    differences=("Keys, queries and values have the same heads; fla's option of more value heads is left out.",),
    variants={
        "gated-deltanet-2": Variant(
            options={"gates": "channel"},
            paper="arXiv 2605.22791",
            summary="delta rule that decays, erases and writes by channel, short convolutions, gated norm",
            source=f"{REPOSITORY}: fla/layers/gdn2.py, fla/ops/gdn2/naive.py",
            differences=("fla has the layer alone, without a model: it starts and trains as KDA does.",),
        ),
    },
)
class KDA(DeltaMixer):
    """The KDA mixer: delta rule with decays per channel, norm of each head's output, low-rank gate, projection."""

    class Config(MixerConfig):
        """Options of KDA."""

        heads: int | None = Field(None, ge=1, description="heads; hidden / 128 when not given")
        head_dim: int | None = Field(
            None,
            ge=1,
            description="size of a head, and rank of decay and gate; hidden / heads when not given",
        )
        conv_width: int = Field(4, ge=1, description="tokens the short convolutions see")
        gates: Literal["head", "channel"] = Field(
            "head",
            description="a writing strength for each head, or erasing and writing strengths for each channel",
        )
        negative: bool = Field(False, description="writing strengths up to 2, so that the memory may change its sign")

    sizes: ClassVar = {768: {"heads": 6}, 2048: {"heads": 16}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        heads = config.heads or choose_heads(layer.hidden, None, head_dim=128)
        dim = config.head_dim or divide(layer.hidden, heads, "hidden size by heads")
        strongest = 2.0 if config.negative else 1.0
        self.memory = DeltaMemory(
            layer.hidden, heads, dim, dim, config.conv_width, strongest, by_channel=config.gates == "channel"
        )
        self.decay_down = nn.Linear(layer.hidden, dim, bias=False)
        self.decay_up = nn.Linear(dim, heads * dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * dim))
        self.gate_down = nn.Linear(layer.hidden, dim, bias=False)
        self.gate_up = nn.Linear(dim, heads * dim)
        self.norm_weight = nn.Parameter(torch.empty(dim))
        self.out = nn.Linear(heads * dim, layer.hidden, bias=False)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """Return [B, T, H, K], in float32 or wider: -A softplus(W_up W_down x + b)."""
        dt = step_size(self.decay_up(self.decay_down(x_BTD)), self.dt_bias)
        return -self.A_log.to(dt.dtype).exp()[:, None] * dt.unflatten(-1, (self.memory.heads, -1))

    def finish(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Normalise each head, gate by a map of low rank, project."""
        normed = rms_norm(o_BTHV, EPS) * self.norm_weight.to(o_BTHV.dtype)
        return self.out(normed.flatten(2) * torch.sigmoid(self.gate_up(self.gate_down(x_BTD))))

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official (fla's _init_weights): normal(0.02), convolutions too; norms 1; A in (1, 16), dt in [1e-3, 0.1]."""
        return {
            **default_recipe(self),
            **{f"memory.{name}": recipe for name, recipe in self.memory.recipe().items()},
            "A_log": ParameterRecipe(init=log_of_uniform(1.0, 16.0), decay=False),
            "dt_bias": ParameterRecipe(init=step_size_bias(), decay=False),
            "norm_weight": ParameterRecipe(init=constant(1.0), decay=False),
            "out.weight": ParameterRecipe(init=normal(0.02)),
        }

    def flops(self, length: int) -> float:
        """The memory with its decays (K V per head and token), and the projections of decay, gate and output."""
        parts = self.decay_down, self.decay_up, self.gate_down, self.gate_up, self.out
        weights = sum(part.weight.numel() for part in parts)
        fading = self.memory.heads * self.memory.key_dim * self.memory.value_dim
        return self.memory.flops(length) + length * (2.0 * weights + fading)


_KDA = LayerChoice(mixer=KDA)

hybrid(
    "kda 3:1",
    layers=(_KDA, _KDA, _KDA, LayerChoice(mixer=Attention, options={"position": "none"})),
    backbone="swiglu",
    paper=PAPER,
    summary="of four layers, three of Kimi Delta Attention and one of softmax attention without positions",
    source="MoonshotAI/Kimi-Linear@858dba5: README.md, tech_report.pdf",
    differences=(
        "The attention has keys and values of its own for every head, where Kimi Linear compresses them (MLA).",
        "Every layer has a dense SwiGLU, where Kimi Linear has experts.",
    ),
)
