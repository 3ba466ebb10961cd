"""Initialise a module by the recipes of its parameters."""

from collections.abc import Mapping

import torch
from torch import nn

from basecap.errors import ConfigError, describe_error, nearest
from basecap.mixers._contract import Mixer
from basecap.mixers._recipes import ParameterRecipe, generator_for
from basecap.registry import source_location


def initialise(module: nn.Module, recipes: Mapping[str, ParameterRecipe], seed: int) -> None:
    """Set every parameter by its recipe: a pure function of (seed, parameter name) on any device and dtype.

    Values are drawn in float32 on the CPU from a generator seeded by the SHA-256 of seed and name, so neither the
    order of the modules nor a new parameter elsewhere changes them.

    Raises:
        ConfigError: as `refuse_other_recipes`, or an initialiser fails.
    """
    refuse_other_recipes(module, recipes)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            start = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            try:
                recipes[name].init(start, generator_for(seed, name))
            except Exception as error:  # a plugin's initialiser, or another object in its place
                owner, own = _owner(module, name)
                raise ConfigError(f"{owner}: the recipe of {own!r} fails: {describe_error(error)}; fix it.") from error
            parameter.copy_(start)


def refuse_other_recipes(module: nn.Module, recipes: Mapping[str, ParameterRecipe]) -> None:
    """Raise ConfigError for a parameter without a recipe, a recipe without a parameter, or one of another type."""
    parameters = dict(module.named_parameters())
    for name in sorted(parameters.keys() ^ recipes.keys()):
        owner, own = _owner(module, name)
        if name in recipes:
            hint = nearest(own, [_owner(module, other)[1] for other in parameters])
            raise ConfigError(f"{owner}: recipe() names {own!r}, which is not a parameter; {hint}")
        example = f"{{**super().recipe(), {own!r}: ParameterRecipe(init=normal(0.02))}}"
        raise ConfigError(
            f"{owner}: parameter {own!r} has no recipe; give it one in recipe(), such as {example}, with both names "
            "from basecap.mixers."
        )
    for name, recipe in recipes.items():
        if not isinstance(recipe, ParameterRecipe):
            owner, own = _owner(module, name)
            found = type(recipe).__name__
            raise ConfigError(f"{owner}: the recipe of {own!r} is of type {found}; write ParameterRecipe(init=...).")


def _owner(module: nn.Module, name: str) -> tuple[str, str]:
    """Return the mixer in `module` that parameter `name` belongs to, as text, and its name in that class."""
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        if isinstance(part, Mixer) and name.startswith(start):
            return f"mixer {type(part).__name__} ({source_location(type(part))})", name.removeprefix(start)
    return type(module).__name__, name
