"""The Triton kernels of the delta rule: through the interpreter in float32, on a GPU in every dtype."""

import pytest
import torch
from torch import Tensor

from basecap.ops._dispatch import interpreted
from basecap.ops.delta_rule import eager, operators, reference
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._recurrences import draw

NAMES = ("o", "state", "dq", "dk", "dv", "dbeta", "dlog_decay", "dstate")

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])


def inputs(
    B: int, T: int, H: int, K: int, V: int, device: str, dtype: torch.dtype, strength: float = 0.1
) -> list[Tensor]:
    """q and k of norm 1, v, beta in (0, 1), log decay, state."""
    q, k = (torch.nn.functional.normalize(draw(i, B, T, H, K), dim=-1) for i in range(2))
    low = [q, k, draw(2, B, T, H, V)]
    wide = [draw(3, B, T, H).sigmoid(), -strength * draw(4, B, T, H).abs(), draw(5, B, H, K, V)]
    return [x.to(device, dtype) for x in low] + [x.to(device, torch.float32) for x in wide]


def packed(B: int, T: int, mean: int) -> Tensor:
    """Segments of about `mean` tokens."""
    return (torch.rand(B, T, generator=torch.Generator().manual_seed(T)) * mean < 1).cumsum(1)


def values_and_gradients(function, tensors: list[Tensor | None], segments: Tensor | None) -> dict[str, Tensor]:
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    o, state = function(*leaves, segments)[:2]
    seeds = [draw(7 + i, *x.shape).to(x) for i, x in enumerate((o, state))]
    given = [x for x in leaves if x is not None]
    names = [name for name, x in zip(NAMES[2:], leaves, strict=True) if x is not None]
    grads = torch.autograd.grad([o, state], given, seeds)
    return {"o": o.detach(), "state": state.detach(), **dict(zip(names, grads, strict=True))}


def assert_kernels(tensors: list[Tensor | None], segments: Tensor | None = None, definition=reference) -> None:
    """Compare the kernels with float64, their errors with those of the eager path."""
    wide = [None if x is None else x.double() for x in tensors]
    exact = values_and_gradients(definition.delta_rule, wide, segments)
    plain = values_and_gradients(eager.delta_rule, tensors, segments)
    found = values_and_gradients(operators.scan, tensors, segments)
    for name, truth in exact.items():
        assert_as_accurate(name, found[name], plain[name], truth)


@anywhere
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", [(2, 1, 1, 3, 2), (2, 37, 2, 8, 5), (1, 150, 2, 40, 20)])
def test_kernels_are_as_accurate_as_eager(device: str, sizes: tuple[int, ...], gated: bool):
    *tensors, log_decay, state = inputs(*sizes, device, torch.float32)
    assert_kernels([*tensors, log_decay if gated else None, state])
