"""Shared by the Mamba mixers: their options, the optional short convolution, the initial step sizes and decays."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from basecap.mixers._contract import Cache, MixerConfig
from basecap.mixers._parts import ShortConvolution
from basecap.mixers._recipes import Initialiser, Start

#: The official code: repository and commit.
REPOSITORY = "state-spaces/mamba@e9594ce1c732d97440f0332fdc43170a2294dbfa"

SHARED_DECAY = (
    "The shared decay has a separate step size, which starts like the others', and A in [1, 16); the authors of this "
    "ablation (arXiv 2505.18522) publish no code."
)


class StateSpaceConfig(MixerConfig):
    """Options that Mamba-1 and Mamba-2 have in common."""

    expand: int = Field(2, ge=1, description="channels inside the mixer per channel of the model")
    conv: bool = Field(True, description="whether a short convolution precedes the state space")
    conv_width: int = Field(4, ge=1, description="tokens the short convolution sees")
    decay: Literal["full", "one", "none"] = Field(
        "full", description="one decay per head or channel, a single one for all, or none: a running sum"
    )


def step_size_bias() -> Initialiser:
    """Inverse softplus of step sizes drawn log-uniformly from [0.001, 0.1] (arXiv 2312.00752, section 3.6)."""

    def fill(parameter: Tensor, generator: torch.Generator) -> None:
        parameter.uniform_(math.log(1e-3), math.log(0.1), generator=generator)
        dt = parameter.exp()
        parameter.copy_(dt + torch.log(-torch.expm1(-dt)))

    return Start("inverse softplus of log-uniform in [0.001, 0.1]", fill)


def log_of_uniform(low: float, high: float) -> Initialiser:
    """Logarithm of a value drawn uniformly from [low, high)."""
    words = f"log of uniform in [{low:g}, {high:g})"
    return Start(words, lambda parameter, generator: parameter.uniform_(low, high, generator=generator).log_())


def step_size(raw: Tensor, bias: Tensor) -> Tensor:
    """Return softplus(raw + bias), the step size, in float32 or wider."""
    return F.softplus(raw.to(torch.promote_types(raw.dtype, torch.float32)) + bias)


def convolve(conv: ShortConvolution | None, x_BTD: Tensor, segments: Tensor | None) -> Tensor:
    """Return the short convolution, which ends with a SiLU, or the SiLU of x if there is none."""
    return F.silu(x_BTD) if conv is None else conv(x_BTD, segments)


def convolve_step(conv: ShortConvolution | None, x_B1D: Tensor, cache: Cache) -> Tensor:
    """One token of `convolve`, updating the cache."""
    return F.silu(x_B1D) if conv is None else conv.step(x_B1D, cache.tensors["conv"])
