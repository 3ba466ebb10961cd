"""The Triton kernels of the delta rule: through the interpreter in float32, on a GPU in every dtype."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.ops.delta_rule import delta_rule, eager, reference
from basecap.ops.delta_rule.triton_kernels import operators
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


@anywhere
@pytest.mark.parametrize("strength", [0.001, 10.0])
def test_weak_and_strong_decays(device: str, strength: float):
    assert_kernels(inputs(1, 80, 2, 16, 16, device, torch.float32, strength))


@anywhere
@pytest.mark.parametrize("mean", [2, 40])
def test_packed_rows(device: str, mean: int):
    tensors = inputs(2, 130, 2, 40, 20, device, torch.float32)
    assert_kernels(tensors, packed(2, 130, mean).to(device))


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 500, 4, 96, 192),
        (2, 1030, 2, 128, 128),
        (1, 300, 2, 64, 64),
        (1, 200, 1, 100, 48),
        (1, 1, 8, 96, 96),
        (1, 10, 2, 64, 64),
    ],
)
@pytest.mark.parametrize("segmented", [False, True])
def test_half_precision(device: str, dtype: torch.dtype, sizes: tuple[int, ...], segmented: bool):
    segments = packed(*sizes[:2], 60).to(device) if segmented else None
    assert_kernels(inputs(*sizes, device, dtype), segments)


@anywhere
@pytest.mark.parametrize("sizes", [(1, 1, 8, 96, 96), (1, 5, 4, 64, 64)])
def test_what_passes_through_a_chunk_keeps_float32(device: str, sizes: tuple[int, ...]):
    """The gradient of a lone chunk's decays comes from the first state, which is float32 in a half-precision model."""
    assert_kernels(inputs(*sizes, device, torch.float16))


@anywhere
def test_nothing_else_leaks_into_the_results(device: str):
    """Rows, heads and segments by themselves give the same as together."""
    q, k, v, beta, log_decay, _ = inputs(2, 70, 2, 16, 16, device, torch.float32)
    segments = (torch.arange(70, device=device) >= 33).long().expand(2, 70)
    whole, _ = delta_rule(q, k, v, beta, log_decay, segments=segments, backend="triton")
    part = [x[1:, 33:, 1:] for x in (q, k, v, beta, log_decay)]
    alone, _ = delta_rule(*part, backend="triton")
    torch.testing.assert_close(whole[1:, 33:, 1:], alone)


@anywhere
def test_the_operator_keeps_its_promises(device: str):
    tensors = [x.requires_grad_() for x in inputs(1, 20, 1, 8, 8, device, torch.float32)]
    torch.library.opcheck(operators.scan.overload, (*tensors, None), test_utils=("test_schema", "test_faketensor"))


@anywhere
def test_any_dtype_of_the_small_tensors_is_taken(device: str):
    q, k, v, beta, log_decay, state = inputs(1, 40, 2, 16, 16, device, torch.float32)
    exact, last = delta_rule(q, k, v, beta, log_decay, state_BHKV=state, backend="triton")
    o, final = delta_rule(q, k, v, beta.double(), log_decay.double(), state_BHKV=state.double(), backend="triton")
    torch.testing.assert_close(o, exact)
    torch.testing.assert_close(final, last)


@in_interpreter
def test_wide_heads_are_refused():
    q, k, v, beta = inputs(1, 2, 1, 129, 4, "cpu", torch.float32)[:4]
    with pytest.raises(ConfigError, match="at most 128 channels"):
        delta_rule(q, k, v, beta, backend="triton")
