"""Sequence mixers: one file per architecture, found by scanning; see `_contract.py` for what a file holds."""

from basecap.mixers._contract import (
    ARCHITECTURES,
    Cache,
    LayerSpec,
    Mixer,
    MixerConfig,
    ParameterRecipe,
    Variant,
    default_recipe,
    hybrid,
    mixer,
)

__all__ = [
    "ARCHITECTURES",
    "Cache",
    "LayerSpec",
    "Mixer",
    "MixerConfig",
    "ParameterRecipe",
    "Variant",
    "default_recipe",
    "hybrid",
    "mixer",
]
