"""Checks of what the ops take: kernels would read outside of what does not fit."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from basecap.errors import ConfigError

#: Log decays below this leave nothing, whatever the dtype, and sums of them keep the digits of weaker ones.
GONE = -1e5


def check_floating(tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless all of these, by the names of their arguments, are floating-point tensors."""
    for name, x in tensors.items():
        check_tensor(name, x)
        if not x.is_floating_point():
            raise ConfigError(f"{name} must be floating point, not {x.dtype}.")


def check_integers(name: str, x: Tensor) -> None:
    """Raise ConfigError unless the argument of this name is a tensor of integers (or truth values)."""
    check_tensor(name, x)
    if x.is_floating_point() or x.is_complex():
        raise ConfigError(f"{name} must be integers, not {x.dtype}.")


def check_tensor(name: str, x: object) -> None:
    """Raise ConfigError unless the argument of this name is a tensor."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{name} must be a torch.Tensor, not {type(x).__name__}.")


def is_whole(number: object) -> bool:
    """Whether this is an integer, and no truth value."""
    return isinstance(number, int) and not isinstance(number, bool)


def check_scale(scale: float | None) -> None:
    """Raise ConfigError unless this is a positive number, or None."""
    if scale is None:
        return
    if not (is_whole(scale) or isinstance(scale, float)) or not 0 < scale < float("inf"):
        raise ConfigError(f"scale must be positive and finite, not {scale!r}.")


def check_state(state: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ConfigError unless the state, where one is given, is floating point and has this shape."""
    if state is None:
        return
    check_floating({"state": state})
    if tuple(state.shape) != tuple(shape):
        raise ConfigError(f"state {tuple(state.shape)} must be {tuple(shape)} for these inputs.")


def check_segments(segments: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ConfigError unless the segments, where some are given, are integers [B, T] = `shape` that never decrease.

    Decreasing ones, of which an id may come back, are only found where looking costs next to nothing: on a CPU,
    outside of compiled and traced code. A GPU would have to be waited for.
    """
    if segments is None:
        return
    check_integers("segments", segments)
    if tuple(segments.shape) != tuple(shape):
        raise ConfigError(f"segments {tuple(segments.shape)} must be [B, T] = {tuple(shape)}.")
    if segments.device.type != "cpu" or torch.compiler.is_compiling() or type(segments) is not Tensor:
        return
    if _decrease(segments):
        raise ConfigError("segments must not decrease along a row; number the sequences of each row in their order.")


def _decrease(segments: Tensor) -> bool:
    try:
        return bool((segments[:, 1:] < segments[:, :-1]).any())
    except RuntimeError:  # under vmap and make_fx, tensors have no numbers to look at
        return False


def check_devices(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise ConfigError unless all tensors given, by the names of their arguments, are on the first one's device."""
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    first = next(iter(devices))
    for name, device in devices.items():
        if device != devices[first]:
            raise ConfigError(f"{name} is on {device} but {first} on {devices[first]}; move one of them.")
