"""Launch a function's Triton kernels again without Triton's dispatcher, which takes 40 to 90 us a kernel.

A function decorated with `replayed` allocates tensors and launches kernels, and what it does depends on the shapes,
strides, dtypes, devices and alignment of its arguments and on numbers, never on the tensors' values. Its second call
with such arguments is recorded: allocations, launches and other operations of PyTorch. Later calls do the same from the
record, with one allocation for all tensors that do not leave the function. The compiled kernels and the numbers are the
same, so the results are the same bit by bit.

A call is ordinary where something has to watch it (a mode, a transform, fake tensors, a profiler of launches), where
two arguments are other views that begin at one address, and where the function does what no record can hold. So is
every call where Triton launches in another way than versions 3.4 to 3.7 do on NVIDIA's GPUs.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from basecap.ops._replay import recorder
from basecap.ops._replay.recorder import record_call

R = TypeVar("R")

#: Records kept of a function; beyond them it forgets all and begins anew.
MOST_RECORDS = 512

#: Kinds of devices whose launches are recorded.
DEVICES = ("cuda",)

_PLAIN = (Tensor, torch.nn.Parameter)
_VALUES = (type(None), bool, int, str)

#: The records of each function.
_ALL: list[dict[Any, Any]] = []

#: One function is recorded at a time: the recording replaces Triton's launcher.
_recording = threading.Lock()


def replayed(function: Callable[..., R]) -> Callable[..., R]:
    """Return a function that does what this one does, from its third call with such arguments on from a record.

    Arguments are given by position: tensors, lists of them, numbers, strings and None.
    """
    records: dict[Any, Callable[..., R] | bool] = {}
    _ALL.append(records)

    @wraps(function)
    def call(*given: Any) -> R:
        flat: list[Tensor] = []
        key = _key(given, flat)
        if key is None:
            return function(*given)
        record = records.get(key)
        if callable(record):
            return record(*flat)
        if record is None:
            # Compiles the kernels, so that their launchers are all that the next call has to record.
            if len(records) >= MOST_RECORDS:
                records.clear()
            records[key] = True
        elif record and _recording.acquire(blocking=False):
            try:
                out, records[key] = record_call(partial(function, *given), flat)
                return out
            finally:
                _recording.release()
        return function(*given)

    return call


def forget() -> None:
    """Forget all records. They hold what constants of modules were when they were made: for trials that change one."""
    for records in _ALL:
        records.clear()


def _key(given: Sequence[Any], flat: list[Tensor]) -> tuple[Any, ...] | None:
    """Return what the function's work depends on, and add its tensors to `flat`; None: the call is ordinary."""
    parts: list[Any] = [torch.are_deterministic_algorithms_enabled()]
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return None
    if not _describe(given, flat, [], parts) or not flat:
        return None
    kind = _kind_of(flat[0].device)
    if kind not in DEVICES or recorder.observed():
        return None
    parts.append(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
    return tuple(parts)


def _describe(given: Sequence[Any], flat: list[Tensor], addresses: list[int], parts: list[Any]) -> bool:
    """Add each argument to the lists, what it is to `parts`; return False if no record can hold one of them."""
    for x in given:
        kind = type(x)
        if kind in _PLAIN:
            address, layout = x.data_ptr(), (x.shape, x.stride(), x.dtype)
            if address in addresses:
                # A record finds arguments by their addresses: one that is given twice is one of its arguments.
                of = addresses.index(address)
                first = flat[of]
                if layout != (first.shape, first.stride(), first.dtype):
                    return False
                parts.append(~of)  # no length of a list
                continue
            flat.append(x)
            addresses.append(address)
            parts += *layout, x.get_device(), address % 16
        elif kind is list or kind is tuple:
            parts.append(len(x))
            if not _describe(x, flat, addresses, parts):
                return False
        elif kind is float:
            parts.append(x.hex())  # 0.0 and -0.0 are equal, and a NaN is not equal to itself
        elif kind in _VALUES:
            parts += kind, x  # True, 1 and 1.0 are equal
        else:
            return False
    return True


@cache
def _kind_of(device: torch.device) -> str:
    """Return the kind of a device, whose name PyTorch makes anew each time."""
    return device.type
