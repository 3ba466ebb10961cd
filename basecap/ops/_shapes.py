"""Shapes of what every recurrence takes besides its inputs: kernels would read outside of what does not fit."""

from collections.abc import Sequence

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
