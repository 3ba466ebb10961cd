"""RWKV-4's Triton kernels against the parallel form: in the interpreter, or on a GPU.

The definition, one token after the other in float32, is no measure: its rounding errors add up token by token.
"""

import pytest
import torch

from basecap.ops._dispatch import interpreted
from basecap.ops.wkv4 import operators
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import relative_error
from tests.ops._recurrences import assert_as_exact, draw, packed, results

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])

T, D = 200, 48


def kernels(*args):
    """Return outputs and final state, by the definition's positions."""
    return operators.wkv4(*args, family="triton_kernels")


def parts(seed: int, batch: int, device: str) -> list[torch.Tensor]:
    """k, v, decay, bonus and a first state; from 0.01 to 100 of a logarithm decay per token."""
    x = [draw(10 * seed + i, batch, T, D) for i in range(2)]
    x += [torch.exp(2 * draw(10 * seed + 2, D)), draw(10 * seed + 3, D), draw(10 * seed + 4, batch, 2, D)]
    return [part.float().to(device) for part in x]


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize("seed", range(2))
def test_as_accurate_as_the_parallel_form(device: str, seed: int):
    *x, state = parts(seed, 1 + seed % 2, device)
    # In float64 the parallel form is the definition to 1e-9, see test_wkv4.
    assert_as_exact(kernels, operators.wkv4, x, first=state if seed else None)


@pytest.mark.usefixtures("poisoned")
@anywhere
def test_segments(device: str):
    """One begins with a chunk of 64 tokens, others at its edges and inside."""
    *x, state = parts(8, 1, device)
    segments = packed(1, [1, 6, 63, 128, 129, 150], T).to(device)
    assert_as_exact(kernels, operators.wkv4, x, first=state, segments=segments)


@anywhere
def test_gradients_of_tokens_long_remembered(device: str):
    """What the future owes to a token adds up over hundreds; in float64, it errs half as much as the parallel form."""
    k, v = draw(0, 1, 500, 8) - 5, draw(1, 1, 500, 8)
    x = [part.float().to(device) for part in (k, v, torch.full((8,), 1e-3), draw(2, 8))]
    found, plain = (results(op, x, None, None)[2:] for op in (kernels, operators.wkv4))
    exact = results(operators.wkv4, [part.double() for part in x], None, None)[2:]
    for kernel, eager, truth in zip(found, plain, exact, strict=True):
        assert 2 * relative_error(kernel, truth) < relative_error(eager, truth)
