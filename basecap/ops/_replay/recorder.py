"""Records a call of a function that allocates tensors and launches kernels."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from basecap.ops._replay.record import STREAM, Address, Call, Location, Memory, compile_record

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}


class _Unrecordable(Exception):
    """A function does what no record can hold."""


def record_call(function: Callable[[], Any], flat: list[Tensor]) -> tuple[Any, Callable[..., Any] | bool]:
    """Call the function and return its results and a function that replays the call, or False where none can."""
    recorder = Recorder(flat)
    with recorder.launches(), recorder:
        out = function()
    if recorder.failed:
        return out, False
    try:
        results = recorder.placed(out)
    except _Unrecordable:
        return out, False
    return out, compile_record(flat, recorder.memories, recorder.steps, results)


class Recorder(TorchDispatchMode):
    """Collects what a call does: `memories`, one for each allocation, and `steps`."""

    def __init__(self, flat: list[Tensor]) -> None:
        super().__init__()
        self.flat = flat
        self.memories: list[Memory] = []
        self.steps: list[Call] = []
        self.failed = False
        #: Descriptors of tensors, with what makes them.
        self.descriptors: list[tuple[Any, Call]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        if func in _ALLOCATIONS or func in _ZEROS:
            self.memories.append(Memory(out, zero=func in _ZEROS))
        elif not _is_view(func):
            try:
                self._operation(func, args, options, out)
            except _Unrecordable:
                self.failed = True
        return out

    def _operation(self, func: Any, args: Any, options: dict[str, Any], out: Any) -> None:
        results = [out] if isinstance(out, Tensor) else out
        known = isinstance(results, (list, tuple)) and all(isinstance(x, Tensor) for x in results)
        if not known or _UNKNOWN & set(func.tags):
            raise _Unrecordable
        given, options = self.placed(args), {name: self.placed(x) for name, x in options.items()}
        slots: tuple[int, ...] = ()
        if not func._schema.is_mutable:
            first = len(self.flat) + len(self.memories)
            slots = tuple(range(first, first + len(results)))
            self.memories += [Memory(x, returned=True) for x in results]
        self.steps.append(Call(func, given, options, slots))

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Add each launch of a kernel by this thread to the steps, as the call of Triton's function in C."""
        launcher, thread = launcher_class(), threading.get_ident()
        ordinary = launcher.__call__

        def launch(launcher: Any, *given: Any) -> None:
            if threading.get_ident() != thread:
                ordinary(launcher, *given)
                return
            stream = given[3]
            with _watched(launcher, lambda core, given: self._launch(core, given, stream)):
                ordinary(launcher, *given)

        launcher.__call__ = launch
        try:
            with self._described():
                yield
        finally:
            launcher.__call__ = ordinary

    @contextmanager
    def _described(self) -> Iterator[None]:
        """Note which calls make the descriptors of tensors that kernels take."""
        utilities = driver_utilities()
        with ExitStack() as stack:
            for name in [name for name in dir(utilities) if name.startswith("fill_tma_descriptor")]:
                make = getattr(utilities, name)

                def note(address: int, *options: Any, make: Callable[..., Any] = make) -> Any:
                    made = make(address, *options)
                    self.descriptors.append((made, Call(make, (address, *options), {})))
                    return made

                setattr(utilities, name, note)
                stack.callback(setattr, utilities, name, make)
            yield

    def _launch(self, core: Callable[..., None], given: tuple[Any, ...], stream: int) -> None:
        """Add a launch to the steps; the fourth argument is the stream."""
        if given[3] != stream:
            self.failed = True
            return
        try:
            self.steps.append(Call(core, (*given[:3], STREAM, *self._addresses(given[4:])), {}))
        except _Unrecordable:
            self.failed = True

    def _addresses(self, x: Any) -> Any:
        """Return a launch's arguments with addresses instead of tensors."""
        if isinstance(x, Tensor):
            return Address(self._place(x)) if x.numel() else 0
        for descriptor, made in self.descriptors:
            if x is descriptor:
                address, *options = made.given
                return Call(made.function, (Address(self._place_of(address)), *options), {})
        if isinstance(x, (list, tuple)):
            return type(x)(self._addresses(item) for item in x)
        return x

    def placed(self, x: Any) -> Any:
        """Return x with places instead of tensors, whose memory will be named."""
        if isinstance(x, Tensor):
            place = self._place(x)
            if place.slot >= len(self.flat):
                self.memories[place.slot - len(self.flat)].named = True
            return place
        return type(x)(self.placed(item) for item in x) if isinstance(x, (list, tuple)) else x

    def _place(self, x: Tensor) -> Location:
        """Return where a tensor lies."""
        if not x.numel():
            return self._empty(x)
        memory = x.untyped_storage().data_ptr()
        found = self._place_of(x.data_ptr(), memory)
        of = self._tensor(found.slot)
        # A part of one argument may begin where another one does that shares its memory.
        unclear = x.numel() != of.numel() and sum(y.untyped_storage().data_ptr() == memory for y in self.flat) > 1
        if unclear or x.dtype != of.dtype or x.device != of.device:
            raise _Unrecordable
        same = x is of or (found.offset == 0 and x.shape == of.shape and x.stride() == of.stride())
        return found if same else Location(found.slot, found.offset, (tuple(x.shape), x.stride()))

    def _empty(self, x: Tensor) -> Location:
        """Return where a tensor without elements comes from, which has no address."""
        for slot, of in enumerate([*self.flat, *(memory.tensor for memory in self.memories)]):
            if of is x:
                return Location(slot, 0)
        raise _Unrecordable

    def _place_of(self, address: int, memory: int | None = None) -> Location:
        """Return where an address lies, in the storage that begins at `memory` if that is known."""
        slots = [i for i, of in enumerate(self.flat) if of.data_ptr() == address]
        if not slots and memory is not None:
            slots = [i for i, of in enumerate(self.flat) if of.untyped_storage().data_ptr() == memory]
        if not slots:
            slots = [len(self.flat) + i for i, of in enumerate(self.memories) if _holds(of.tensor, address)]
        if len(slots) != 1:  # of none, or of several arguments that share their memory otherwise at the next call
            raise _Unrecordable
        return Location(slots[0], address - self._tensor(slots[0]).data_ptr())

    def _tensor(self, slot: int) -> Tensor:
        return self.flat[slot] if slot < len(self.flat) else self.memories[slot - len(self.flat)].tensor


@contextmanager
def _watched(launcher: Any, note: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `note` with the function in C that a launcher calls, and with its arguments."""
    launch = launcher.launch
    # Where a kernel takes descriptors, a function around that in C makes them.
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    cell = launch.__closure__[names.index("launcher")] if "launcher" in names else None
    core = launch if cell is None else cell.cell_contents

    thread = threading.get_ident()

    def call(*given: Any) -> None:
        core(*given)
        if threading.get_ident() == thread:
            note(core, given)

    def put(function: Callable[..., None]) -> None:
        if cell is None:
            launcher.launch = function
        else:
            cell.cell_contents = function

    put(call)
    try:
        yield
    finally:
        put(core)


def launcher_class() -> Any:
    """Return the class whose objects launch compiled kernels on the current device."""
    from triton.runtime import driver

    return driver.active.launcher_cls


def driver_utilities() -> Any:
    """Return Triton's functions in C for the current device."""
    from triton.runtime import driver

    return driver.active.utils


def _holds(tensor: Tensor, address: int) -> bool:
    storage = tensor.untyped_storage()
    return storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and not func._schema.is_mutable and all(x.alias_info is not None for x in returns)
