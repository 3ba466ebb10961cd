"""Launch a function's Triton kernels again without Triton's dispatcher, which takes 40 to 90 us a kernel.

What a function that is `Replayed` does, which allocates tensors and launches kernels, depends on its arguments' kinds,
see `kinds_of`, never on the tensors' values. Its second call with such arguments is recorded: allocations, launches and
other operations of PyTorch. Later calls do the same from the record, with one allocation for all tensors that do not
leave the function. The compiled kernels and the numbers are the same, so the results are the same bit by bit.

A call is ordinary where something has to watch it (a mode, a transform, fake tensors, a profiler of launches), and
where the function does what no record can hold: two arguments may be other views that begin at one address. So is every
call where Triton launches in another way than versions 3.4 to 3.8 do on NVIDIA's GPUs.
"""

import importlib.util
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from basecap.ops._kinds import kinds_of
from basecap.ops._replay.recorder import launches_of, observed, record_call

R = TypeVar("R")

#: Records kept of a function; beyond them it forgets all and begins anew.
MOST_RECORDS = 512

#: Kinds of devices whose launches are recorded.
DEVICES = ("cuda",)

_ALL: weakref.WeakSet["Replayed[Any]"] = weakref.WeakSet()

#: One function is recorded at a time: the recording replaces Triton's launcher.
_recording = threading.Lock()


class Kind(Generic[R]):
    """Calls of a function with arguments of one kind: what replays them, if anything does."""

    def __init__(self, given: Sequence[Any]) -> None:
        #: Which arguments are tensors, of a list which items.
        self.tensors = [
            [isinstance(item, Tensor) for item in x] if isinstance(x, (list, tuple)) else isinstance(x, Tensor)
            for x in given
        ]
        self.replay: Callable[..., R] | None = None
        #: Whether the next call is recorded; None: the kernels are not compiled yet.
        self.recorded: bool | None = None


class Replayed(Generic[R]):
    """Does what a function does, from its third call with arguments of one kind on from a record.

    Arguments are given by position: tensors, lists of them, numbers, strings and None. Autograd does not see what is
    done: it would take results that are parts of other tensors for views, which callers could not change in place.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        self.function = function
        self.records: dict[Any, Kind[R]] = {}
        _ALL.add(self)

    def __call__(self, *given: Any) -> R:
        """Return what the function returns."""
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            return self._ordinary(given)
        flat: list[Tensor] = []
        kinds = kinds_of(given, flat)
        return self._ordinary(given) if kinds is None else self.of(kinds, given, flat)[0]

    def of(self, kinds: tuple[Any, ...], given: Sequence[Any], flat: Sequence[Tensor]) -> tuple[R, Kind[R]]:
        """Return what the function returns for `given`, which no mode watches, and the kind of the call.

        Args:
            kinds: kinds of the arguments.
            given: the arguments.
            flat: the tensors among them.
        """
        key = (kinds, torch.are_deterministic_algorithms_enabled(), _autocast(flat))
        kind = self.records.get(key)
        if kind is None:
            if len(self.records) >= MOST_RECORDS:
                self.records.clear()
            kind = self.records[key] = Kind(given)
        if kind.replay is None:
            return self._recorded(kind, given, flat), kind
        return self._ordinary(given) if observed() else kind.replay(*flat), kind

    def _ordinary(self, given: Sequence[Any]) -> R:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self.function(*given)

    def _recorded(self, kind: Kind[R], given: Sequence[Any], flat: Sequence[Tensor]) -> R:
        """Return what the function returns, and record the call if it is the second one."""
        call = partial(self._ordinary, given)
        if not flat or flat[0].device.type not in DEVICES or importlib.util.find_spec("triton") is None:
            kind.recorded = False
        if kind.recorded is False or observed() or not _recording.acquire(blocking=False):
            return call()
        try:
            if kind.recorded is None:
                # Compiles the kernels, so that their launchers are all that the next call has to record.
                out, kind.recorded = launches_of(call)
            else:
                out, kind.replay = record_call(call, list(flat))
                kind.recorded = kind.replay is not None
        finally:
            _recording.release()
        return out


def forget() -> None:
    """Forget all records. They hold what constants of modules were when they were made: for trials that change one."""
    for replayed in _ALL:
        replayed.records.clear()


def _autocast(flat: Sequence[Tensor]) -> torch.dtype | None:
    """Return the dtype of products under autocast on the tensors' device."""
    if not flat or not torch._C._is_any_autocast_enabled():
        return None
    kind = flat[0].device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
