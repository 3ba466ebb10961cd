"""The Triton kernels of Taylor attention: through the interpreter in float32, on a GPU in every dtype."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.ops.taylor_attention import eager, reference, taylor_attention
from basecap.ops.taylor_attention.triton_kernels import operators
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._recurrences import draw, packed

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])


def inputs(length: int, features: int, values: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    # Four rows where one would do for the kernels: how two largest errors compare is luck among few numbers.
    shapes = [(4, length, 2, n) for n in (features, features, values)]
    return [draw(i, *shape).to(device, dtype) for i, shape in enumerate(shapes)]


def results(function, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    o = function(*leaves)
    seed = draw(9, *o.shape).to(o)
    return [o.detach(), *torch.autograd.grad(o, leaves, seed)]


def assert_kernels(tensors: list[Tensor], chunk: int) -> None:
    exact = results(reference.taylor_attention, [x.double() for x in tensors])
    # The same chunks: what goes through sums of features is rounded otherwise than what goes through scores.
    plain = results(lambda *x: eager.taylor_attention(*x, chunk=chunk), tensors)
    found = results(lambda *x: operators.attend(*x, 1e-12, chunk)[0], tensors)
    for name, a, b, truth in zip(("o", "dq", "dk", "dv"), found, plain, exact, strict=True):
        assert_as_accurate(name, a, b, truth)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize(
    ("length", "features", "values", "chunk"),
    [(1, 4, 8, 16), (20, 16, 20, 16), (50, 15, 16, 64), (70, 3, 5, 32), (64, 7, 64, 32)],
)
def test_kernels_are_as_accurate_as_eager(device: str, length: int, features: int, values: int, chunk: int):
    assert_kernels(inputs(length, features, values, device), chunk)


@anywhere
@pytest.mark.parametrize("zero", [0, 1])
def test_of_a_first_token_the_gradients_cancel(device: str, zero: int):
    """Its weight is 1 where its query or key is zero, and whatever it were, the output would be the value."""
    tensors = inputs(1, 16, 20, device)
    tensors[zero].zero_()
    o, dq, dk, _ = results(lambda *x: operators.attend(*x, 1e-12, 16)[0], tensors)
    assert torch.equal(o, tensors[2])
    assert not dq.any()
    assert not dk.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1000, 4096])
@pytest.mark.parametrize("device", [on_gpu])
def test_kernels_at_size(device: str, length: int, dtype: torch.dtype):
    assert_kernels(inputs(length, 16, 64, device, dtype), operators.CHUNK)


@anywhere
def test_the_public_function_runs_them(device: str):
    q, k, v = inputs(20, 4, 8, device)
    expected = operators.attend(q, k, v, 1e-12, operators.CHUNK)[0]
    assert torch.equal(taylor_attention(q, k, v, backend="triton"), expected)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(taylor_attention(*turned, backend="triton"), expected)


@anywhere
def test_operators(device: str):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = [x.requires_grad_() for x in inputs(20, 4, 8, device)]
    found = torch.library.opcheck(operators.attend.overload, (*leaves, 1e-12, 16), test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("option", ["segments", "state", "features"])
def test_what_they_cannot_do_is_refused(option: str):
    q, k, v = inputs(8, 40 if option == "features" else 4, 8, "cpu")
    segments = packed(len(q), [3], 8) if option == "segments" else None
    state = torch.zeros(len(q), 2, 15, 9) if option == "state" else None
    with pytest.raises(ConfigError, match="they take no state, no segments"):
        taylor_attention(q, k, v, segments=segments, state_BHFX=state, backend="triton")
