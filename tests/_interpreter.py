"""Makes Triton's interpreter quick without a change of what it computes.

- At every call of a function by a kernel it looks through all names of `triton.language` and puts its own functions
  there, which the launch has done already: here it does so once per process.
- It reduces and scans with a user-defined combining function (`tl.flip` is one of the former) number by number: here
  slice by slice along the axis, in the same order, so that every number is the same to the bit.
- For every sum and product of integers it computes whether they overflow, which it asserts for a kernel in debug mode
  alone: here it does not compute that.
- It makes the type and the shape of every tensor anew at every operation: here once each.
- At every operation it writes down anew which of NumPy's dtypes stands for which of Triton's: here it looks it up.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from basecap.ops._dispatch import interpreted

#: The functions of the interpreter that those of this file stand for, by name.
AS_IT_COMES: dict[str, Any] = {}


def quicken() -> None:
    """Make the interpreter quick, where kernels run in it, for the rest of the process."""
    if not interpreted():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    prepared = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = type(prepared)()  # what a launch takes back when it ends
    interpreter._patch_lang = lambda function: nothing
    for operations, name, ours in (
        (interpreter.ReduceOps, "generic_reduce", reduce),
        (interpreter.ScanOps, "generic_scan", scan),
    ):
        AS_IT_COMES[name] = getattr(operations, name)
        setattr(operations, name, ours)

    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    AS_IT_COMES["tensor"], AS_IT_COMES["block_type"] = tl.tensor.__init__, tl.block_type.__init__
    tl.tensor.__init__, tl.block_type.__init__ = _make_tensor, _make_block_type

    known: dict[str, np.dtype] = {}
    find = interpreter._get_np_dtype

    def look_up(dtype: Any) -> np.dtype:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = look_up


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    """Stand for the constructor of `triton.language.tensor`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _sizes(tuple(type.shape) if type.is_block() else ())


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
    import triton.language as tl

    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _make_block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    """Stand for the constructor of `triton.language.block_type`."""
    self.element_ty = element_ty
    self.shape, self.numel, words = _block(tuple(getattr(size, "value", size) for size in shape))
    self.name = f"<{words}, {element_ty}>"


@functools.cache
def _block(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    import triton.language as tl

    made = object.__new__(tl.block_type)
    AS_IT_COMES["block_type"](made, tl.int1, list(shape))  # refuses some shapes
    return made.shape, made.numel, str(made.shape)


def reduce(self: Any, tensors: Sequence[Any]) -> list[Any]:
    """Stand for `ReduceOps.generic_reduce`."""
    tensors, axis = self.unravel(tensors, self.axis)
    slices = _slices(tensors, axis)
    held = next(slices)
    for new in slices:
        held = _combine(self, tensors, held, new)
    held = [np.expand_dims(x, axis) if self.keep_dims else x for x in held]
    return [self.to_tensor(x, tensor.dtype) for x, tensor in zip(held, tensors, strict=True)]


def scan(self: Any, tensors: Sequence[Any]) -> list[Any]:
    """Stand for `ScanOps.generic_scan`."""
    slices = _slices(tensors, self.axis)
    steps = [next(slices)]
    for new in slices:
        steps.append(_combine(self, tensors, steps[-1], new))
    results = (np.stack(x, self.axis) for x in zip(*steps, strict=True))
    return [self.to_tensor(x, tensor.dtype) for x, tensor in zip(results, tensors, strict=True)]


def _slices(tensors: Sequence[Any], axis: int) -> Any:
    """Return an iterator over the slices across the axis, one array for each of the tensors."""
    return zip(*(np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors), strict=True)


def _combine(self: Any, tensors: Sequence[Any], held: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    dtypes = [tensor.dtype for tensor in tensors]
    given = (self.to_tensor(x, dtype) for x, dtype in zip((*held, *new), dtypes * 2, strict=True))
    found = self.combine_fn.fn(*given)
    found = found if isinstance(found, tuple) else (found,)
    return [x.handle.data.astype(y.dtype).reshape(y.shape) for x, y in zip(found, new, strict=True)]
