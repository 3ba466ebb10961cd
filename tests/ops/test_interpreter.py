"""The interpreter's reductions, scans, types and tensors as the tests run them are its own, to the bit."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from basecap.ops._dispatch import interpreted
from tests._interpreter import AS_IT_COMES, broadcast, pair, reduce, scan

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


def draw(*shape: int) -> tuple:
    """Return a tensor of float32 and one of int32 as kernels have them; without a shape they are numbers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    generator = np.random.default_rng(0)
    size = shape or 1
    numbers = generator.standard_normal(size, dtype=np.float32), generator.integers(-99, 99, size, dtype=np.int32)
    types = tl.float32, tl.int32
    return tuple(
        tl.tensor(TensorHandle(x, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)
        for x, dtype in zip(numbers, types, strict=True)
    )


def join(decay, count, next_decay, next_count):
    """Neither commutative nor exact in float32."""
    return decay * next_decay + 0.1 * next_decay, count ^ next_count


def assert_same_bits(found: list, expected: list) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.type == y.type and x.handle.data.dtype == y.handle.data.dtype
        assert np.array_equal(x.handle.data, y.handle.data)


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [((8,), 0), ((8,), None), ((4, 8), 0), ((4, 8), 1), ((2, 4, 2), 1), ((2, 4, 2), 2)]
)
def test_reductions(shape: tuple[int, ...], axis: int | None, keep_dims: bool):
    from triton.runtime.interpreter import ReduceOps

    tensors = draw(*shape)
    if axis is None:  # several tensors without an axis are beyond the interpreter
        tensors, combine = tensors[:1], SimpleNamespace(fn=lambda x, y: 0.1 * x + y)
    else:
        combine = SimpleNamespace(fn=join)
    operation = ReduceOps(axis, combine, keep_dims)
    assert_same_bits(reduce(operation, tensors), AS_IT_COMES["generic_reduce"](operation, tensors))


@pytest.mark.parametrize(("shape", "axis"), [((8,), 0), ((1,), 0), ((4, 8), 0), ((4, 8), 1), ((2, 4, 2), 1)])
def test_scans(shape: tuple[int, ...], axis: int):
    from triton.runtime.interpreter import ScanOps

    operation, tensors = ScanOps(axis, SimpleNamespace(fn=join), reverse=False), draw(*shape)
    assert_same_bits(scan(operation, tensors), AS_IT_COMES["generic_scan"](operation, tensors))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((8,), (8,)),
        ((4, 1), (1, 8)),
        ((1, 8), (4, 8)),
        ((8,), (4, 8)),
        ((4, 8), (8,)),
        ((4, 8), ()),
        ((), (8,)),
        ((), ()),
    ],
)
def test_operands(left: tuple[int, ...], right: tuple[int, ...]):
    from triton.runtime.interpreter import interpreter_semantic

    for one in draw(*left):
        for other in draw(*right):
            for ours, name in ((broadcast, "broadcast_impl_value"), (pair, "binary_op_type_checking_impl")):
                assert_same_bits(
                    [*ours(interpreter_semantic, one, other)], [*AS_IT_COMES[name](interpreter_semantic, one, other)]
                )


SHAPES, NUMBERS = [(4, 8), (4, 1), (1, 8), (1,), ()], [-0.0, 0.3, 7, -2]


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
@pytest.mark.parametrize(
    ("left", "right"),
    [*product(SHAPES, SHAPES), *product(SHAPES, NUMBERS), *product(NUMBERS, SHAPES)],  # two numbers are the compiler's
)
def test_arithmetic(left: tuple[int, ...] | float, right: tuple[int, ...] | float, name: str):
    from triton.runtime.interpreter import interpreter_semantic

    for one in draw(*left) if isinstance(left, tuple) else (left,):
        for other in draw(*right) if isinstance(right, tuple) else (right,):
            found = getattr(interpreter_semantic, name)(one, other, True)
            expected = AS_IT_COMES[name](interpreter_semantic, one, other, True)
            assert_same_bits([found], [expected])
            assert np.array_equal(np.signbit(found.handle.data), np.signbit(expected.handle.data))
            assert sizes(found) == sizes(expected) and found.handle.dtype == expected.handle.dtype


@pytest.mark.parametrize(("shape", "axis"), [((8,), 0), ((8,), 1), ((4, 8), 1), ((4, 8), 2), ((), 0)])
def test_dimensions_of_one(shape: tuple[int, ...], axis: int):
    from triton.runtime.interpreter import interpreter_semantic

    for tensor in draw(*shape):
        expected = AS_IT_COMES["expand_dims"](interpreter_semantic, tensor, axis)
        assert_same_bits([interpreter_semantic.expand_dims(tensor, axis)], [expected])


def test_numbers_wider_than_their_type_are_refused():
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    with pytest.raises(ValueError, match="exceeds"):
        TensorHandle(np.zeros(2), tl.float32)


def sizes(tensor) -> list[int]:
    assert all(type(size).__name__ == "constexpr" for size in (*tensor.shape, tensor.numel))
    return [size.value for size in (*tensor.shape, tensor.numel)]


@pytest.mark.parametrize("shape", [[], [1], [8], [4, 2]])
def test_types_and_tensors(shape: list[int]):
    import triton.language as tl

    for element in (tl.float32, tl.int1, tl.pointer_type(tl.bfloat16)):
        ours = its = element
        if shape:
            ours, its = (object.__new__(tl.block_type) for _ in range(2))
            ours.__init__(element, [tl.constexpr(size) for size in shape])
            AS_IT_COMES["block_type"](its, element, shape)
            assert ours == its and vars(ours).keys() == vars(its).keys() and str(ours) == str(its)
            assert ours.numel == its.numel and ours.shape.values == its.shape.values == shape
        tensor, expected = (object.__new__(tl.tensor) for _ in range(2))
        tensor.__init__("handle", ours)
        AS_IT_COMES["tensor"](expected, "handle", its)
        assert vars(tensor).keys() == vars(expected).keys() and sizes(tensor) == sizes(expected)
        assert (tensor.handle, tensor.dtype, tensor.type) == ("handle", expected.dtype, expected.type)
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])
