"""The selective scan's kernels for the CPU."""

import functools

import numpy as np
import pytest
import torch

from basecap.ops.selective_scan import selective_scan
from basecap.testing.tolerance import assert_as_accurate
from tests.ops.test_selective_scan import NAMES, assert_kernels_accurate, inputs, packed, values_and_gradients

pytest.importorskip("numba")

from basecap.ops.selective_scan.numba_kernels import kernels_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1, 3, 1), (1, 35, 36, 2), (3, 64, 1, 4), (2, 147, 40, 5), (1, 300, 17, 1)])
def test_kernels_of_the_cpu(sizes: tuple[int, int, int, int], segmented: bool, dtype: torch.dtype):
    assert_kernels_accurate("cpu", dtype, sizes, packed(*sizes[:2]) if segmented else None, "numba")


def test_threads_of_the_cpu_change_nothing(monkeypatch: pytest.MonkeyPatch):
    tensors = inputs(5, 70, 6, 3, dtype=torch.float32)
    alone = values_and_gradients(selective_scan, tensors, packed(5, 70))
    monkeypatch.setattr(kernels_parts, "WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    parted = values_and_gradients(selective_scan, tensors, packed(5, 70))
    assert all(torch.equal(a, b) for a, b in zip(alone, parted, strict=True))


def test_the_default_dtype_changes_nothing():
    tensors = inputs(2, 9, 4, 3, dtype=torch.float32)
    run = functools.partial(values_and_gradients, functools.partial(selective_scan, backend="numba"), tensors, None)
    expected = run()
    torch.set_default_dtype(torch.float16)
    try:
        found = run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_kernels_of_the_cpu_leave_what_they_are_given_alone():
    # With one state a transposed tensor is its own copy.
    tensors = inputs(2, 9, 4, 1, dtype=torch.float32)
    before = [tensor.detach().clone() for tensor in tensors]
    y, final = selective_scan(*tensors[:5], state_BDN=tensors[5], backend="numba")
    dy, dfinal = torch.ones_like(y), torch.ones_like(final)
    torch.autograd.grad([y, final], tensors, [dy, dfinal])
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert dy.eq(1).all() and dfinal.eq(1).all()


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("strength", [0.0001, 0.05, 0.2])
@pytest.mark.parametrize("T", [1024, 16_384])
def test_a_long_memory_is_as_accurate_as_in_plain_pytorch(T: int, strength: float, positive: bool):
    drawn = [tensor.detach().abs() if positive else tensor.detach() for tensor in inputs(1, T, 4, 2, strength)]
    drawn[2] = -drawn[2].abs()

    def run(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [tensor.float().to(dtype).requires_grad_() for tensor in drawn]
        return values_and_gradients(functools.partial(selective_scan, backend=backend), tensors, None)

    truth, plain, found = run("eager", torch.float64), run("eager", torch.float32), run("numba", torch.float32)
    for name, a, b, exact in zip(NAMES, found, plain, truth, strict=True):
        assert_as_accurate(name, a, b, exact)


@pytest.mark.parametrize("T", [9, 150])
@pytest.mark.parametrize("backend", ["eager", "numba"])
def test_a_step_that_is_no_number_spoils_no_earlier_sequence(backend: str, T: int):
    x, dt, A, Bs, Cs, state = (tensor.detach().requires_grad_() for tensor in inputs(1, T, 4, 2, dtype=torch.float32))
    with torch.no_grad():
        dt[0, 5] = torch.nan
    segments = (torch.arange(T) >= 5).long()[None]
    y, _ = selective_scan(x, dt, A, Bs, Cs, state_BDN=state, segments=segments, backend=backend)
    dx, ddt, dB, dstate = torch.autograd.grad(y.sum(), [x, dt, Bs, state])
    assert y[:, :5].isfinite().all() and dstate.isfinite().all()
    assert all(gradient[:, :5].isfinite().all() for gradient in (dx, ddt, dB))


def test_the_power_of_two_of_the_cpu():
    x = np.linspace(-126, 127, 100_001, dtype=np.float32)
    found, exact = np.array([kernels_parts.exp2(value) for value in x]), np.exp2(x.astype(np.float64))
    assert np.abs(found / exact - 1).max() <= 2 * 2.0**-24
    assert kernels_parts.exp2(np.float32(-np.inf)) == kernels_parts.exp2(np.float32(-200)) == 0
    assert kernels_parts.exp2(np.float32(0)) == 1 and np.isnan(kernels_parts.exp2(np.float32(np.nan)))
