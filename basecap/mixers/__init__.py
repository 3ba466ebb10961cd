"""Sequence mixers: one file per architecture, found by scanning; docs/mixers.md says what a file holds."""

from basecap.mixers._contract import (
    ARCHITECTURES,
    Cache,
    LayerChoice,
    LayerSpec,
    Mixer,
    MixerConfig,
    Variant,
    choose_heads,
    divide,
    hybrid,
    mixer,
)
from basecap.mixers._recipes import (
    Initialiser,
    ParameterRecipe,
    constant,
    default_recipe,
    normal,
    orthogonal,
    residual_std,
    uniform,
    values,
)

__all__ = [
    "ARCHITECTURES",
    "Cache",
    "Initialiser",
    "LayerChoice",
    "LayerSpec",
    "Mixer",
    "MixerConfig",
    "ParameterRecipe",
    "Variant",
    "choose_heads",
    "constant",
    "default_recipe",
    "divide",
    "hybrid",
    "mixer",
    "normal",
    "orthogonal",
    "residual_std",
    "uniform",
    "values",
]
