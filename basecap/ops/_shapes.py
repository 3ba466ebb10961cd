"""Shapes and devices of what the ops take: kernels would read outside of what does not fit."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from basecap.errors import ConfigError

#: Log decays below this leave nothing, whatever the dtype, and sums of them keep the digits of weaker ones.
GONE = -1e5


def check_state(state: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ConfigError unless the state, where one is given, has this shape."""
    if state is not None and tuple(state.shape) != tuple(shape):
        raise ConfigError(f"state {tuple(state.shape)} must be {tuple(shape)} for these inputs.")


def check_segments(segments: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ConfigError unless the segments, where some are given, have this shape [B, T]."""
    if segments is not None and tuple(segments.shape) != tuple(shape):
        raise ConfigError(f"segments {tuple(segments.shape)} must be [B, T] = {tuple(shape)}.")


def check_devices(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise ConfigError unless all tensors given, by the names of their arguments, are on the first one's device."""
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    first = next(iter(devices))
    for name, device in devices.items():
        if device != devices[first]:
            raise ConfigError(f"{name} is on {device} but {first} on {devices[first]}; move one of them.")
