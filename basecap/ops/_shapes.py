"""Checks of the arguments of ops: with wrong shapes, kernels would read outside of their memory."""

from collections.abc import Mapping, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from basecap.errors import ConfigError

#: Log decays below this give 0 in any dtype, and sums with them keep the digits of weaker decays.
LOWEST_LOG_DECAY = -1e5

#: The dtypes that all ops compute with.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: The dtypes of segments and bounds: PyTorch does not compare wider unsigned integers.
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_floating(tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless all of these tensors, keyed by argument name, have a dtype in `FLOATS`."""
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.dtype not in FLOATS:
            if not x.is_floating_point():
                raise ConfigError(f"{name} must be floating point, not {x.dtype}.")
            raise ConfigError(f"{name} must be float16, bfloat16, float32 or float64, not {x.dtype}; convert it.")


def check_integers(name: str, x: Tensor) -> None:
    """Raise ConfigError unless the argument of this name is a tensor of integers (or truth values)."""
    check_tensor(name, x)
    if x.dtype not in INTEGERS:
        raise ConfigError(f"{name} must be integers, such as int64, not {x.dtype}.")


def check_tensor(name: str, x: object) -> None:
    """Raise ConfigError unless the argument of this name is a tensor, neither sparse nor nested."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{name} must be a torch.Tensor, not {type(x).__name__}.")
    if x.layout != torch.strided or x.is_nested:
        raise ConfigError(f"{name} must be a dense tensor, not {'nested' if x.is_nested else 'sparse'}; convert it.")


def is_whole(number: object) -> bool:
    """Whether this is an integer of Python or NumPy and not a bool."""
    return type(number) is int or (isinstance(number, Integral) and not isinstance(number, bool))


def is_number(number: object) -> bool:
    """Whether this is a real number of Python or NumPy and not a bool."""
    return isinstance(number, Real) and not isinstance(number, bool)


def check_scale(scale: float | None, width: int) -> float:
    """Return the factor of the scores as a Python number, 1/sqrt(width) for None; ConfigError unless it is positive."""
    if scale is None:
        return width**-0.5
    if not is_number(scale):
        raise ConfigError(f"scale must be positive and a Python number, not {scale!r}.")
    if not 0 < scale < float("inf"):
        raise ConfigError(f"scale must be positive and finite, not {scale!r}.")
    return float(scale)


def check_state(state: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ConfigError unless the state, if given, is floating point and has this shape."""
    if state is None:
        return
    check_floating({"state": state})
    if tuple(state.shape) != tuple(shape):
        raise ConfigError(f"state {tuple(state.shape)} must be {tuple(shape)} for these inputs.")


def check_segments(segments: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ConfigError unless the segments, if given, are integers [B, T] = `shape` that never decrease.

    Decreasing ids, which could repeat, are only detected where the check is cheap: on a CPU, outside of compiled and
    traced code. On a GPU the check would have to synchronise.
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


def lowest_log_decay(dtype: torch.dtype) -> float:
    """Return `LOWEST_LOG_DECAY`, or the lowest number of a dtype without it, float16, which leaves as little."""
    return max(LOWEST_LOG_DECAY, torch.finfo(dtype).min)


def finite_log_decay(log_decay: Tensor) -> Tensor:
    """Return the log decays, -inf among them, at least `LOWEST_LOG_DECAY`: sums of infinities differ by NaN."""
    return log_decay.clamp(min=lowest_log_decay(log_decay.dtype))


def check_devices(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise ConfigError unless all tensors given, by the names of their arguments, are on the first one's device."""
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    first = next(iter(devices))
    for name, device in devices.items():
        if device != devices[first]:
            raise ConfigError(f"{name} is on {device} but {first} on {devices[first]}; move one of them.")
