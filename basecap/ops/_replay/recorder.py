"""Records a call of a function that allocates tensors and launches kernels."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
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
#: Allocations of memory that is filled with a number, and which of their arguments that is.
_FILLED = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.new_full.default: 2}
#: Numbers and the like, which are the same in every call of one kind.
_CONSTANTS = (type(None), bool, int, float, str, bytes)
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}


class _Unrecordable(Exception):
    """A function does what no record can hold."""


def record_call(function: Callable[[], Any], flat: list[Tensor]) -> tuple[Any, Callable[..., Any] | None]:
    """Call the function and return its results and a function that replays the call, or None where none can."""
    recorder = Recorder(flat)
    with recorder.launches(), recorder:
        out = function()
    # A function that launches nothing is called as it is, and so one whose launches a newer Triton hides.
    if recorder.failed or not recorder.launched:
        return out, None
    try:
        results = recorder.results(out)
    except _Unrecordable:
        return out, None
    return out, compile_record(flat, recorder.memories, recorder.steps, results)


def launches_of(function: Callable[[], Any]) -> tuple[Any, bool]:
    """Call the function and return its results and whether it launched kernels."""
    launched = []

    def launch(ordinary: Callable[..., None], launcher: Any, given: tuple[Any, ...]) -> None:
        launched.append(launcher)
        ordinary(launcher, *given)

    with _intercepted(launch):
        return function(), bool(launched)


class Recorder(TorchDispatchMode):
    """Collects what a call does: `memories`, one for each allocation, and `steps`."""

    def __init__(self, flat: list[Tensor]) -> None:
        super().__init__()
        self.flat = flat
        #: Slots of the arguments without those that are one of these again.
        self.arguments = [slot for slot in range(len(flat)) if not self._again(slot)]
        self.memories: list[Memory] = []
        self.steps: list[Call] = []
        #: Launches among the steps.
        self.launched = 0
        self.failed = False
        #: Descriptors of tensors, with what makes them.
        self.descriptors: list[tuple[Any, Call]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        if func in _ALLOCATIONS:
            self.memories.append(Memory(out))
        elif func in _ZEROS:
            self.memories.append(Memory(out, filled=0))
        elif func in _FILLED:
            self.memories.append(Memory(out, filled=args[_FILLED[func]]))
        elif not (_is_view(func) and _shares(out, (*args, *options.values()))):
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

        def launch(ordinary: Callable[..., None], launcher: Any, given: tuple[Any, ...]) -> None:
            given, before = _without_hooks(given), self.launched
            known = {id(x) for x in _leaves([*given, *getattr(launcher, "__dict__", {}).values()])}
            with _watched(launcher, lambda core, passed: self._launch(core, passed, given[3], known)):
                ordinary(launcher, *given)
            if self.launched != before + 1:  # a launcher of another make
                self.failed = True

        with _intercepted(launch), self._described():
            yield

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

    def _launch(self, core: Callable[..., None], given: tuple[Any, ...], stream: int, known: set[int]) -> None:
        """Add a launch to the steps; the fourth argument is the stream, `known` what its launcher took and holds."""
        self.launched += 1
        if given[3] != stream:
            self.failed = True
            return
        try:
            self.steps.append(Call(core, (*given[:3], STREAM, *self._addresses(given[4:], known)), {}))
        except _Unrecordable:
            self.failed = True

    def _addresses(self, x: Any, known: set[int]) -> Any:
        """Return a launch's arguments with addresses instead of tensors."""
        if isinstance(x, _CONSTANTS):
            return x
        if isinstance(x, Tensor):
            return Address(self._place(x)) if x.numel() else 0
        for descriptor, made in self.descriptors:
            if x is descriptor:
                address, *options = made.given
                return Call(made.function, (Address(self._place_of(address)), *options), {})
        if isinstance(x, (list, tuple)):
            return _rebuilt(x, lambda item: self._addresses(item, known))
        # What was made for this launch, or holds a tensor, may have an address in it that is another the next time.
        if id(x) not in known or any(hasattr(x, name) for name in ("data_ptr", "base")):
            raise _Unrecordable
        return x

    def results(self, x: Any) -> Any:
        """Return what a function returned with places instead of tensors."""
        if isinstance(x, (list, tuple)):
            return _rebuilt(x, self.results)
        if not isinstance(x, (Tensor, *_CONSTANTS)):
            raise _Unrecordable
        return self.placed(x)

    def placed(self, x: Any) -> Any:
        """Return x with places instead of tensors, whose memory will be named."""
        if isinstance(x, Tensor):
            place = self._place(x)
            if place.slot >= len(self.flat):
                self.memories[place.slot - len(self.flat)].named = True
            return place
        return _rebuilt(x, self.placed) if isinstance(x, (list, tuple)) else x

    def _place(self, x: Tensor) -> Location:
        """Return where a tensor lies."""
        if not x.numel():
            return self._empty(x)
        found = self._place_of(x.data_ptr())
        of = self._tensor(found.slot)
        if x.dtype != of.dtype or x.device != of.device:
            raise _Unrecordable
        same = x is of or (found.offset == 0 and x.shape == of.shape and x.stride() == of.stride())
        return found if same else Location(found.slot, found.offset, (tuple(x.shape), x.stride()))

    def _empty(self, x: Tensor) -> Location:
        """Return where a tensor without elements comes from, which has no address: of what has its memory."""
        given = [*self.flat, *(memory.tensor for memory in self.memories)]
        for slot, of in enumerate(given):
            if of is x:
                return Location(slot, 0)
        for slot, of in enumerate(given):
            if _storage(of) == _storage(x) and of.dtype == x.dtype and of.device == x.device:
                return Location(slot, 0, (tuple(x.shape), x.stride()))
        raise _Unrecordable

    def _place_of(self, address: int) -> Location:
        """Return where an address lies."""
        slots = [slot for slot in self.arguments if _reaches(self.flat[slot], address)]
        if not slots:
            slots = [len(self.flat) + i for i, of in enumerate(self.memories) if _holds(of.tensor, address)]
        if len(slots) != 1:  # of none, or of several arguments that share their memory otherwise at the next call
            raise _Unrecordable
        return Location(slots[0], address - self._tensor(slots[0]).data_ptr())

    def _again(self, slot: int) -> bool:
        """Whether an argument is one of those before it: kinds of arguments say which begin where others do."""
        x = self.flat[slot]
        same = (of for of in self.flat[:slot] if of.data_ptr() == x.data_ptr())
        return any(of.shape == x.shape and of.stride() == x.stride() and of.dtype == x.dtype for of in same)

    def _tensor(self, slot: int) -> Tensor:
        return self.flat[slot] if slot < len(self.flat) else self.memories[slot - len(self.flat)].tensor


@contextmanager
def _intercepted(launch: Callable[[Callable[..., None], Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `launch` for each launch of a kernel by this thread, with what launches it, the launcher and arguments."""
    kind, thread = launcher_class(), threading.get_ident()
    ordinary = kind.__call__

    def call(launcher: Any, *given: Any) -> None:
        if threading.get_ident() == thread:
            launch(ordinary, launcher, given)
        else:
            ordinary(launcher, *given)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = ordinary


@contextmanager
def _watched(launcher: Any, note: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `note` with the function in C that a launcher calls, and with its arguments."""
    launch = getattr(launcher, "launch", None)
    if launch is None:  # a launcher of another make, whose launches are not seen
        yield
        return
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


def launch_hooks() -> tuple[Any, Any]:
    """Return what Triton calls before and after each launch, for profilers."""
    runtime = _knobs().runtime
    return runtime.launch_enter_hook, runtime.launch_exit_hook


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs


def observed() -> bool:
    """Whether a profiler asked Triton to be called at each launch."""
    enter, leave = launch_hooks()
    return _asks(enter) or _asks(leave)


def _asks(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


def _without_hooks(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a launcher's arguments without the hooks and what these get: no profiler asked to be called."""
    enter, leave = launch_hooks()
    stand_here = len(given) > 8 and given[7] is enter and given[8] is leave
    return (*given[:6], None, None, None, *given[9:]) if stand_here else given


def _rebuilt(x: Any, change: Callable[[Any], Any]) -> Any:
    """Return a list or tuple with each item changed; itself if none is."""
    items = [change(item) for item in x]
    if all(new is old for new, old in zip(items, x, strict=True)):
        return x
    if type(x) not in (list, tuple):
        raise _Unrecordable
    return type(x)(items)


def _leaves(x: Any) -> Iterator[Any]:
    """Return what lists, tuples and dicts hold in the end."""
    for item in x.values() if isinstance(x, dict) else x:
        if isinstance(item, (list, tuple, dict)):
            yield from _leaves(item)
        else:
            yield item


def _shares(out: Any, given: tuple[Any, ...]) -> bool:
    """Whether every tensor of a result has the memory of a tensor given: `contiguous` and others copy where they must.

    Of operations that consist of others, PyTorch shows a mode the parts only where autograd may see them.
    """
    memories = {_storage(x) for x in _leaves(given) if isinstance(x, Tensor)}
    return all(_storage(x) in memories for x in _leaves([out]) if isinstance(x, Tensor))


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _reaches(x: Tensor, address: int) -> bool:
    """Whether an element of x has this address: arguments that are parts of one tensor lie between one another."""
    rest, within = divmod(address - x.data_ptr(), x.element_size())
    if not x.numel() or within or rest < 0:
        return False
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True), reverse=True):
        rest -= min(rest // stride, size - 1) * stride if stride else 0
    return rest == 0


def _holds(tensor: Tensor, address: int) -> bool:
    storage = tensor.untyped_storage()
    return storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and not func._schema.is_mutable and all(x.alias_info is not None for x in returns)
