"""A recorded call as a Python function that is written for it: a loop over steps would take as long as the launches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

#: Bytes at multiples of which tensors begin, as those of PyTorch's own allocator do.
ALIGNMENT = 512

#: Shape and stride.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Location:
    """Where a tensor lies: `offset` bytes from where the memory `slot` begins, or the argument of this number.

    Without a layout (shape and stride) it is all of that.
    """

    slot: int
    offset: int
    layout: Layout | None = None


@dataclass(frozen=True)
class Address:
    """The address of a place, as kernels take it."""

    place: Location


@dataclass(frozen=True)
class Call:
    """A call of a function of Python, whose result is an argument of another or, with `results`, a step by itself."""

    function: Callable[..., Any]
    given: tuple[Any, ...]
    options: dict[str, Any]
    #: Slots of the tensors that it returns.
    results: tuple[int, ...] = ()


#: Stands for the stream that kernels are launched on.
STREAM = object()


@dataclass
class Memory:
    """Memory that a recorded call allocated."""

    #: Holds the memory while the call is recorded, so that its address stays its own.
    tensor: Tensor
    #: The number that it is filled with.
    filled: float | None = None
    #: Whether a tensor is made of it: a result, or what an operation of PyTorch takes or returns.
    named: bool = False
    #: Whether an operation of PyTorch, replayed, returns it.
    returned: bool = False


def compile_record(
    given: Sequence[Tensor], memories: Sequence[Memory], steps: Sequence[Call], results: Any
) -> Callable[..., Any]:
    """Return a function of tensors like those given that does the steps and returns the results.

    Args:
        given: the tensor arguments, slots 0 to n - 1.
        memories: what the call allocates, slots n, n + 1, ...
        steps: launches, and operations of PyTorch.
        results: what the call returns, with places for tensors.
    """
    spans = _spans(steps, results)
    writer = _Writer(given, memories, [*steps, results])
    made: list[list[str]] = [[] for _ in range(len(steps) + 1)]
    tensors: set[int] = set()
    scratch: list[_Block] = []
    for slot, memory in enumerate(memories, len(given)):
        if slot not in spans:
            continue
        first, last = spans[slot]
        if memory.returned or memory.named or memory.filled is not None:
            tensors.add(slot)
        if memory.returned:
            continue
        if slot in tensors:
            made[first].append(f"t{slot} = {writer.constant(_maker(memory, writer.layouts.get(slot)))}()")
            made[first] += writer.address(slot)
        else:
            scratch.append(_Block(slot, memory.tensor.untyped_storage().nbytes(), first, last))
    writer.scratch = _arrange(scratch)
    body = [line for slot in range(len(given)) for line in writer.address(slot)]
    if scratch:
        bytes = max(block.offset + block.bytes for block in scratch)
        make = _empty((bytes,), (1,), torch.uint8, given[0].device)
        body += [f"scratch = {writer.constant(make)}()", "base = scratch.data_ptr()"]
    stream = partial(current_stream(), given[0].device.index)
    body.append(f"stream = {writer.constant(stream)}()")
    for at, step in enumerate(steps):
        body += made[at]
        body.append(writer.statement(step))
        body += [line for slot in step.results for line in writer.address(slot)]
        body += [f"del t{slot}" for slot, (_, last) in spans.items() if last == at and slot in tensors]
    body += [*made[-1], f"return {writer.expression(results)}"]
    names = "".join(f"t{slot}, " for slot in range(len(given)))
    if writer.views or any(isinstance(step.function, OpOverload) for step in steps):
        below = writer.constant(torch._C._AutoDispatchBelowADInplaceOrView)
        body = [f"with {below}():", *(f"    {line}" for line in body)]
    source = f"def replay({names}):\n" + "".join(f"    {line}\n" for line in body)
    exec(compile(source, "<recorded launches>", "exec"), writer.names)
    function: Callable[..., Any] = writer.names["replay"]
    return function


class _Writer:
    """Writes expressions; what cannot be written is a constant in `names`."""

    def __init__(self, given: Sequence[Tensor], memories: Sequence[Memory], used: Sequence[Any]) -> None:
        self.names: dict[str, Any] = {}
        #: Offsets of scratch memory.
        self.scratch: dict[int, int] = {}
        places = [place for x in used for place in _places(x)]
        #: Slots whose address kernels take.
        self.addressed = {x.place.slot for x in places if isinstance(x, Address)}
        #: Layouts that memory is made with, where it is only used as a tensor of another layout than its first.
        self.layouts: dict[int, Layout] = {}
        for slot, memory in enumerate(memories, len(given)):
            found = {(x.offset, x.layout) for x in places if isinstance(x, Location) and x.slot == slot}
            ((offset, layout),) = found if len(found) == 1 else [(0, None)]
            if layout is not None and not offset and not memory.returned and _fills(layout, memory.tensor):
                self.layouts[slot] = layout
        #: Whether parts of tensors are made, which autograd must not take for views.
        self.views = any(isinstance(x, Location) and x.layout and x.slot not in self.layouts for x in places)

    def constant(self, x: Any) -> str:
        """Return a name of x."""
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name

    def address(self, slot: int) -> list[str]:
        """Return what finds the address of a tensor, where a kernel takes it."""
        return [f"a{slot} = t{slot}.data_ptr()"] if slot in self.addressed else []

    def statement(self, step: Call) -> str:
        """Return a step as a statement."""
        call = self.expression(step)
        names = [f"t{slot}" for slot in step.results]
        return f"{', '.join(names)}{',' * (len(names) > 1)} = {call}" if names else call

    def argument(self, x: Any) -> str:
        """Return an expression of an argument: of lists that are the same in every call it makes no new ones."""
        return self.constant(x) if isinstance(x, (list, tuple)) and not _varies(x) else self.expression(x)

    def expression(self, x: Any) -> str:
        """Return an expression of x."""
        if x is STREAM:
            return "stream"
        if isinstance(x, Call):
            given = [self.argument(item) for item in x.given]
            given += [f"{name}={self.argument(item)}" for name, item in x.options.items()]
            return f"{self.constant(x.function)}({', '.join(given)})"
        if isinstance(x, Address):
            slot, offset = x.place.slot, x.place.offset
            start, offset = ("base", self.scratch[slot] + offset) if slot in self.scratch else (f"a{slot}", offset)
            return f"{start} + {offset}" if offset else start
        if isinstance(x, Location):
            if x.layout is None or x.slot in self.layouts:
                return f"t{x.slot}"
            return f"{self.constant(partial(_view, *x.layout, x.offset))}(t{x.slot})"
        if isinstance(x, tuple):
            return f"({''.join(f'{self.expression(item)}, ' for item in x)})"
        if isinstance(x, list):
            return f"[{', '.join(self.expression(item) for item in x)}]"
        return repr(x) if x is None or type(x) in (bool, int) else self.constant(x)


def _view(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, of: Tensor) -> Tensor:
    """Return the part of a tensor that begins `offset` bytes after it."""
    if offset == 0 and of.shape == shape and of.stride() == stride:
        return of
    return of.as_strided(shape, stride, of.storage_offset() + offset // of.element_size())


def _spans(steps: Sequence[Call], results: Any) -> dict[int, tuple[int, int]]:
    """Return the first and the last step that uses each slot; results are used behind the last one."""
    spans: dict[int, tuple[int, int]] = {}
    for at, step in enumerate([*steps, results]):
        for slot in _slots(step):
            spans[slot] = (spans.get(slot, (at, at))[0], at)
    return spans


def _varies(x: Any) -> bool:
    """Whether an argument is another one in each call."""
    if isinstance(x, (list, tuple)):
        return any(_varies(item) for item in x)
    return x is STREAM or isinstance(x, (Address, Call, Location))


def _slots(x: Any) -> list[int]:
    """Return the slots of all places in x, and of what it returns."""
    results = x.results if isinstance(x, Call) else ()
    return [*(place.slot if isinstance(place, Location) else place.place.slot for place in _places(x)), *results]


def _places(x: Any) -> list[Location | Address]:
    """Return all places in x."""
    if isinstance(x, (Location, Address)):
        return [x]
    if isinstance(x, Call):
        return [*_places(x.given), *_places(list(x.options.values()))]
    return [place for item in x for place in _places(item)] if isinstance(x, (list, tuple)) else []


def _fills(layout: Layout, tensor: Tensor) -> bool:
    """Whether a contiguous tensor of this layout is all of another."""
    like = torch.empty_strided(*layout, device="meta")
    return like.is_contiguous() and tensor.is_contiguous() and like.numel() == tensor.numel()


@dataclass
class _Block:
    """Scratch memory of `bytes`, in use from the step `first` to the step `last`."""

    slot: int
    bytes: int
    first: int
    last: int
    offset: int = 0


def _arrange(blocks: list[_Block]) -> dict[int, int]:
    """Set the blocks' offsets, and return them by slot, so that none overlap that are in use together."""
    settled: list[_Block] = []
    for block in sorted(blocks, key=lambda block: -block.bytes):
        beside = [other for other in settled if other.first <= block.last and block.first <= other.last]
        for other in sorted(beside, key=lambda other: other.offset):
            if block.offset + block.bytes > other.offset:
                end = other.offset + other.bytes
                block.offset = max(block.offset, -(-end // ALIGNMENT) * ALIGNMENT)
        settled.append(block)
    return {block.slot: block.offset for block in blocks}


def _maker(memory: Memory, layout: Layout | None) -> Callable[[], Tensor]:
    """Return a function that makes such a tensor, or one of this layout."""
    tensor = memory.tensor
    shape, stride = layout or (tuple(tensor.shape), tensor.stride())
    empty = _empty(shape, stride, tensor.dtype, tensor.device)
    number = memory.filled
    if number is None:
        return empty
    # Not for -0.0, which is as false as 0.
    return (lambda: empty().zero_()) if repr(number) == "0" else (lambda: empty().fill_(number))


def _empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Return a function that allocates a tensor: where PyTorch has it, that of compiled code, in half the time."""
    make = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if make is not None:
        return partial(make, shape, stride, dtype)
    return partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)


def current_stream() -> Callable[[int], int]:
    """Return Triton's function for the current stream of a device."""
    from triton.runtime import driver

    stream: Callable[[int], int] = driver.active.get_current_stream
    return stream
