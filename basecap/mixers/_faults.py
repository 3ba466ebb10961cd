"""Locate errors in a mixer under development, for messages that its author can act on."""

import inspect
import math
import reprlib
import traceback
from typing import TYPE_CHECKING

from basecap.errors import ConfigError, describe_error
from basecap.registry import source_location

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from basecap.mixers._contract import Mixer, MixerConfig
    from basecap.mixers._recipes import LayerSpec, ParameterRecipe


def error_location(error: BaseException, cls: type) -> str | None:
    """Return file:line of the innermost frame of `error` in the file of `cls`, None when there is none."""
    file = inspect.getsourcefile(cls)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else None


def build_mixer(cls: "type[Mixer]", config: "MixerConfig", layer: "LayerSpec") -> "Mixer":
    """Return a mixer; raises ConfigError with class and line if its `__init__` fails or is incomplete."""
    needed = "its __init__ must begin with super().__init__(config, layer)"
    mixer = cls.__new__(cls)
    try:
        cls.__init__(mixer, config, layer)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the author's code may raise anything
        location = error_location(error, cls) or source_location(cls)
        advice = "fix it" if "layer" in vars(mixer) else needed
        raise ConfigError(
            f"mixer {cls.__name__} ({location}) cannot be built: {describe_error(error)}; {advice}."
        ) from error
    if "layer" not in vars(mixer):
        raise ConfigError(f"mixer {cls.__name__} ({source_location(cls)}) is incomplete: {needed}.")
    return mixer


def refuse_other_shape(mixer: "Mixer", output: "Tensor", x_BTD: "Tensor") -> None:
    """Raise ConfigError unless the output has the shape of the input: a width of 1 would be broadcast silently."""
    found = getattr(output, "shape", type(output).__name__)
    if found != x_BTD.shape:
        where = f"{type(mixer).__name__} ({source_location(type(mixer))})"
        wanted, given = list(x_BTD.shape), found if isinstance(found, str) else list(found)
        raise ConfigError(f"mixer {where} must return [B, T, D] like its input, {wanted}, not {given}.")


def refuse_other_losses(mixer: "Mixer", found: "Mapping[str, Tensor]") -> None:
    """Raise ConfigError unless a mixer's `forward` has written the auxiliary losses that it declares, and scalars."""
    if found.keys() == mixer.auxiliary.keys() and not any(value.dim() for value in found.values()):
        return
    where, declared = f"{type(mixer).__name__} ({source_location(type(mixer))})", sorted(mixer.auxiliary)
    if sorted(found) != declared:
        raise ConfigError(f"mixer {where} declares the auxiliary losses {declared}, but forward gave {sorted(found)}.")
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items())
    raise ConfigError(f"the auxiliary losses of mixer {where} must be scalars, not {shapes}.")


def declared_recipe(mixer: "Mixer") -> "Mapping[str, ParameterRecipe]":
    """Return `mixer.recipe()`; raises ConfigError with class and line if that fails or is no dict."""
    cls = type(mixer)
    try:
        recipes = mixer.recipe()
    except (Exception, SystemExit) as error:  # as above
        location = error_location(error, cls) or source_location(cls)
        raise ConfigError(
            f"recipe of mixer {cls.__name__} ({location}) fails: {describe_error(error)}; fix it."
        ) from error
    if not isinstance(recipes, dict):
        found = type(recipes).__name__
        raise ConfigError(
            f"recipe of mixer {cls.__name__} ({source_location(cls)}) returns {found}; it must return a dict by name."
        )
    return recipes


def declared_cost(mixer: "Mixer", what: str, length: int) -> float:
    """Return `mixer.flops(length)` or `mixer.state_bytes(length)`; raises ConfigError unless that is a number."""
    cls = type(mixer)
    try:
        number = getattr(mixer, what)(length)
    except (Exception, SystemExit) as error:  # as above
        location = error_location(error, cls) or source_location(cls)
        raise ConfigError(
            f"{what} of mixer {cls.__name__} ({location}) fails: {describe_error(error)}; fix it."
        ) from error
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < 0:
        raise ConfigError(
            f"{what} of mixer {cls.__name__} ({source_location(cls)}) returns {reprlib.repr(number)}; "
            "it must return a finite number of at least 0."
        )
    return number
