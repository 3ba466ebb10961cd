"""Makes Triton's interpreter quick without a change of what it computes.

- At every call of a function by a kernel it looks through all names of `triton.language` and puts its own functions
  there, which the launch has done already: here it does so once per process.
- It reduces and scans with a user-defined combining function (`tl.flip` is one of the former) number by number: here
  slice by slice along the axis, in the same order, so that every number is the same to the bit.
- For every sum and product of integers it computes whether they overflow, which it asserts for a kernel in debug mode
  alone: here it does not compute that.
- It makes the type and the shape of every tensor anew at every operation: here once each.
- It compares types letter by letter and shapes size by size before it finds that two operands need no change: here a
  type and a shape are one object each, and what has the same ones is taken as it is.
- It goes through all arguments of every call of a function twice, to put its own semantics there: here once.
- It writes numbers out to whole tensors, and tensors to the shape that they have together, before it adds them,
  subtracts or multiplies: here NumPy broadcasts them.
- At every operation it writes down anew which of NumPy's dtypes stands for which of Triton's: here it looks it up.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from basecap.ops._dispatch import interpreted

#: The functions of the interpreter that those of this file stand for, by name.
AS_IT_COMES: dict[str, Any] = {}
#: The shapes of types, which are kept: what `_block` returned with one, by its identity.
KNOWN: dict[int, tuple[Any, int, str, tuple[Any, Any]]] = {}
#: Types of values that are no constants and hold none, of those that kernels have most.
PLAIN: set[type] = {int, float, bool, type(None)}
#: Types, by the name of their elements' and the identity of their shape.
TYPES: dict[tuple[str, int], Any] = {}


def quicken() -> None:
    """Make the interpreter quick, where kernels run in it, for the rest of the process."""
    if not interpreted():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_attr = _patch_attr
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
    semantic = type(interpreter.interpreter_semantic)
    for name, ours in (("binary_op_type_checking_impl", pair), ("broadcast_impl_value", broadcast), ("cast", _cast)):
        AS_IT_COMES[name] = getattr(semantic, name)
        setattr(semantic, name, ours)
    for name, ours in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        AS_IT_COMES[name] = getattr(semantic, name)
        setattr(semantic, name, _arithmetic(name, ours))
    for owner, name, ours in (
        (semantic, "expand_dims", expand_dims),
        (type(interpreter.interpreter_builder), "binary_op", _binary_op),
        (interpreter.TensorHandle, "__init__", _make_handle),
        (tl.block_type, "with_element_ty", lambda self, element: _type(element, self.shape)),
        (tl.core, "_unwrap_if_constexpr", _unwrap),
    ):
        AS_IT_COMES[name] = getattr(owner, name)
        setattr(owner, name, ours)
    PLAIN.add(tl.tensor)
    AS_IT_COMES["equal types"] = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda one, other: one is other or AS_IT_COMES["equal types"](one, other)

    known: dict[str, np.dtype] = {}
    find = interpreter._get_np_dtype

    def look_up(dtype: Any) -> np.dtype:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = look_up


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Stand for the interpreter's own, which wraps what is a wrapper already."""
    from triton.runtime.interpreter import interpreter_semantic

    function = inspect.unwrap(member)

    def call(*arguments: Any, _semantic: Any = None, **options: Any) -> Any:
        return function(*arguments, _semantic=interpreter_semantic, **options)

    scope.set_attr(owner, name, call)


def pair(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Stand for `TritonSemantic.binary_op_type_checking_impl`."""
    if type(lhs) is type(rhs) is self.tensor and not div_or_mod:
        one, other = lhs.dtype, rhs.dtype
        if (one is other and not one.is_ptr()) or (allow_lhs_ptr and one.is_ptr() and other.is_int()):
            return self.broadcast_impl_value(lhs, rhs)
    options = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    return AS_IT_COMES["binary_op_type_checking_impl"](self, lhs, rhs, *options)


def _arithmetic(name: str, operation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., Any]:
    """Return what stands for a method of `TritonSemantic`: tensors of one type of elements need no preparation."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def compute(self: Any, input: Any, other: Any, sanitize_overflow: bool) -> Any:
        if type(input) is type(other) is tl.tensor and input.dtype is other.dtype and type(input.dtype) is tl.dtype:
            left, right = input.type, other.type
            if input.shape is other.shape or not right.is_block():
                kind = left
            elif not left.is_block():
                kind = right
            else:
                kind = _type(input.dtype, _joint((*left.shape.values,), (*right.shape.values,)))
            data = operation(input.handle.data, other.handle.data)
        elif type(input) is tl.tensor and input.dtype is tl.float32 and type(other) in (int, float):
            kind, data = input.type, operation(input.handle.data, np.array([other or 0], np.float32))
        elif type(other) is tl.tensor and other.dtype is tl.float32 and type(input) in (int, float):
            kind, data = other.type, operation(np.array([input or 0], np.float32), other.handle.data)
        else:
            return AS_IT_COMES[name](self, input, other, sanitize_overflow)
        return tl.tensor(TensorHandle(data, kind.scalar), kind)

    return compute


def expand_dims(self: Any, input: Any, axis: int) -> Any:
    """Stand for `TritonSemantic.expand_dims`."""
    if not input.type.is_block():
        return AS_IT_COMES["expand_dims"](self, input, axis)
    shape = _widened((*input.type.shape.values,), axis)
    return _tensor(input, input.handle.data.reshape(shape.values), shape)


@functools.cache
def _widened(sizes: tuple[int, ...], axis: int) -> Any:
    wider = [*sizes]
    wider.insert(axis, 1)
    return _block(tuple(wider))[0]


def _binary_op(self: Any, lhs: Any, rhs: Any, operation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Any:
    """Stand for `InterpreterBuilder.binary_op`."""
    output = operation(lhs.data, rhs.data)
    if output.itemsize > lhs.data.itemsize:
        return AS_IT_COMES["binary_op"](self, lhs, rhs, operation)
    return type(lhs)(output, lhs.dtype.scalar)


def _make_handle(self: Any, data: np.ndarray, dtype: Any, attr: dict | None = None) -> None:
    """Stand for the constructor of `TensorHandle`."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > 1 and not dtype.is_ptr() and 8 * data.itemsize > dtype.primitive_bitwidth:
        self.__post_init__()  # refuses it


def _unwrap(given: Any) -> Any:
    """Stand for `_unwrap_if_constexpr`."""
    return given if type(given) in PLAIN else AS_IT_COMES["_unwrap_if_constexpr"](given)


def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Stand for `TritonSemantic.broadcast_impl_value`."""
    left, right = lhs.type, rhs.type
    if left.is_block():
        if not right.is_block():
            return lhs, _filled(rhs, left.shape)
        if left.shape is right.shape:
            return lhs, rhs
        shape = _joint((*left.shape.values,), (*right.shape.values,))
        return _stretched(lhs, shape), _stretched(rhs, shape)
    return (_filled(lhs, right.shape), rhs) if right.is_block() else (lhs, rhs)


@functools.cache
def _joint(left: tuple[int, ...], right: tuple[int, ...]) -> Any:
    return _block(np.broadcast_shapes(left, right))[0]


def _filled(number: Any, shape: Any) -> Any:
    """Return a tensor of this shape, every number of which is this one."""
    data = number.handle.data
    return _tensor(number, np.full(shape.values, data, data.dtype), shape)


def _stretched(tensor: Any, shape: Any) -> Any:
    """Return a tensor in a shape that it can be broadcast to."""
    return tensor if tensor.type.shape is shape else _tensor(tensor, np.broadcast_to(tensor.handle.data, shape), shape)


def _tensor(like: Any, data: np.ndarray, shape: Any) -> Any:
    return type(like)(type(like.handle)(data, like.handle.dtype), _type(like.dtype, shape))


def _type(element: Any, shape: Any) -> Any:
    """Return the type of blocks of this shape, one of those that are kept."""
    import triton.language as tl

    if type(element) is not tl.dtype or id(shape) not in KNOWN:
        return tl.block_type(element, shape)
    key = element.name, id(shape)
    if key not in TYPES:
        TYPES[key] = tl.block_type(element, shape)
    return TYPES[key]


def _cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
    """Stand for `TritonSemantic.cast`."""
    if input.dtype is dst_ty.scalar:
        return input
    return AS_IT_COMES["cast"](self, input, dst_ty, fp_downcast_rounding)


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    """Stand for the constructor of `triton.language.tensor`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if not type.is_block():
        self.numel, self.shape = _sizes(())
    else:
        found = KNOWN.get(id(type.shape))
        self.numel, self.shape = found[3] if found else _sizes(tuple(type.shape))


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
    import triton.language as tl

    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _make_block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    """Stand for the constructor of `triton.language.block_type`."""
    self.element_ty = element_ty
    found = KNOWN.get(id(shape)) or _block(tuple(getattr(size, "value", size) for size in shape))
    self.shape, self.numel, words, _ = found
    self.name = f"<{words}, {element_ty}>"


@functools.cache
def _block(shape: tuple[int, ...]) -> tuple[Any, int, str, tuple[Any, Any]]:
    import triton.language as tl

    made = object.__new__(tl.block_type)
    AS_IT_COMES["block_type"](made, tl.int1, list(shape))  # refuses some shapes
    KNOWN[id(made.shape)] = made.shape, made.numel, str(made.shape), _sizes(shape)
    return KNOWN[id(made.shape)]


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
