"""Where an unfinished mixer is at fault, for sentences that its author can act on."""

import inspect
import math
import traceback
from typing import TYPE_CHECKING

from basecap.errors import ConfigError

if TYPE_CHECKING:
    from basecap.mixers._contract import LayerSpec, Mixer, MixerConfig


def place_of(cls: type) -> str:
    """Return file:line of a class."""
    return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"


def raised_at(error: Exception, cls: type) -> str | None:
    """Return file:line of the innermost frame of `error` in the file of `cls`, None when there is none."""
    file = inspect.getsourcefile(cls)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else None


def in_words(error: Exception) -> str:
    """Return the kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def build(cls: "type[Mixer]", config: "MixerConfig", layer: "LayerSpec") -> "Mixer":
    """Return a mixer; raises ConfigError that names class and place when its `__init__` fails or is incomplete."""
    needed = "its __init__ must begin with super().__init__(config, layer)"
    try:
        mixer = cls(config, layer)
    except ConfigError:
        raise
    except Exception as error:  # whatever the author's code raises, they must learn where
        place = raised_at(error, cls) or place_of(cls)
        raise ConfigError(f"mixer {cls.__name__} ({place}) cannot be built: {in_words(error)}; {needed}.") from error
    if "layer" not in vars(mixer):
        raise ConfigError(f"mixer {cls.__name__} ({place_of(cls)}) is incomplete: {needed}.")
    return mixer


def declared(mixer: "Mixer", what: str, length: int) -> float:
    """Return `mixer.flops(length)` or `mixer.state_bytes(length)`; raises ConfigError unless that is a number."""
    cls = type(mixer)
    try:
        number = getattr(mixer, what)(length)
    except Exception as error:  # as above
        place = raised_at(error, cls) or place_of(cls)
        raise ConfigError(f"{what} of mixer {cls.__name__} ({place}) fails: {in_words(error)}; mend it.") from error
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise ConfigError(
            f"{what} of mixer {cls.__name__} ({place_of(cls)}) returns {number!r}; it must return a number."
        )
    return number
