"""Running sums in pairs, which a GPU adds in a fixed order: as exact as PyTorch's own, with the same gradient."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck

from basecap.ops import _sums, running_sums
from basecap.ops._sums import sums_in_pairs, uncompiled_sums


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return -torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)


def worst(found: torch.Tensor, true: np.ndarray) -> float:
    return float(np.abs(found.cpu().numpy().astype(np.longdouble) - true).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("length", [1, 2, 2500])
def test_sums_in_pairs_are_as_exact_as_sums_in_order(length: int, dtype: torch.dtype):
    x = numbers(2, length, 3, dtype=dtype)
    true = np.cumsum(x.numpy().astype(np.longdouble), axis=1)
    in_order = torch.from_numpy(np.add.accumulate(x.numpy(), axis=1))  # in this dtype, as a GPU adds
    assert worst(sums_in_pairs(x, 1), true) <= 2 * worst(in_order, true)


def test_the_gradient_is_that_of_pytorch():
    x, weights = numbers(3, 37, dtype=torch.float64).requires_grad_(), numbers(3, 37, dtype=torch.float64) + 2
    for dim in (0, 1, -1):
        ours, pytorch = (torch.autograd.grad(f(x, dim), x, weights)[0] for f in (sums_in_pairs, torch.cumsum))
        torch.testing.assert_close(ours, pytorch)


def test_a_gpu_adds_in_pairs_where_the_same_bits_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    x = numbers(2500, dtype=torch.float32)
    in_order, in_pairs = x.cumsum(0), sums_in_pairs(x, 0)
    assert not torch.equal(in_order, in_pairs)
    monkeypatch.setattr(_sums, "deterministic", lambda: True)
    assert torch.equal(running_sums(x, 0), in_order)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert torch.equal(running_sums(x, 0), in_pairs)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_compiled_code_calls_an_operator_with_the_same_bits(dim: int):
    """Inductor generates no scan, which it could fuse with what it cannot."""
    x, weights = numbers(3, 37, 2, dtype=torch.float64).requires_grad_(), numbers(3, 37, 2, dtype=torch.float64) + 2
    called: list[str] = []

    def note(graph: torch.fx.GraphModule, given: list) -> Callable:
        called.extend(str(node.target) for node in graph.graph.nodes if "sum" in str(node.target))
        return make_boxed_func(graph.forward)

    def results(sums: Callable[[torch.Tensor, int], torch.Tensor]) -> list[torch.Tensor]:
        o = sums(x, dim)
        return [o, *torch.autograd.grad(o, x, weights)]

    torch.compiler.reset()
    compiled = results(torch.compile(running_sums, backend=aot_autograd(fw_compiler=note), fullgraph=True))
    assert called == ["basecap.running_sums.default"] * 2
    assert all(map(torch.equal, compiled, results(torch.cumsum)))


def test_the_operator_of_compiled_code():
    opcheck(uncompiled_sums.definition, (numbers(2, 5, 3, dtype=torch.float64).requires_grad_(), 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_on_a_gpu_give_the_same_bits_twice_and_are_as_exact(dtype: torch.dtype):
    x = numbers(4, 4096, 12, dtype=dtype)
    true = np.cumsum(x.numpy().astype(np.longdouble), axis=1)
    allowed = 2 * worst(running_sums(x.cuda(), 1), true)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = [running_sums(x.cuda(), 1) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(run, runs[0]) for run in runs) and worst(runs[0], true) <= allowed
