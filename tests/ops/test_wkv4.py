"""RWKV-4's weighted average: the scan against the definition."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.wkv4 import operators, reference, wkv4
from tests.ops._recurrences import assert_as_exact, assert_same, draw, packed, results

B, D = 2, 7


def inputs(length: int, spread: float = 1.0) -> list[Tensor]:
    """k, v, decay, bonus; with `spread` 100 exp(k) leaves the range of float64."""
    return [spread * draw(0, B, length, D), draw(1, B, length, D), torch.exp(2 * draw(2, D)), draw(3, D)]


@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize("length", [1, 2, 3, 64, 75])
def test_definition(length: int, spread: float):
    x, state = inputs(length, spread), draw(5, B, 2, D)
    assert_same(results(operators.wkv4, x, state, None), results(reference.wkv4, x, state, None))
    assert_same(results(operators.wkv4, x, None, None), results(reference.wkv4, x, None, None))


def test_average_of_two():
    k, v, decay, bonus = inputs(2)
    o, _ = wkv4(k, v, decay, bonus)
    old, new = k[:, 0].exp(), (k[:, 1] + bonus).exp()
    torch.testing.assert_close(o[:, 0], v[:, 0])
    torch.testing.assert_close(o[:, 1], (old * v[:, 0] + new * v[:, 1]) / (old + new))


def test_segments():
    x, state = inputs(75), draw(5, B, 2, D)
    segments = packed(B, [1, 6, 7, 32, 50], 75)
    assert_same(results(operators.wkv4, x, state, segments), results(reference.wkv4, x, state, segments))


def test_no_gradient_crosses_segments():
    x = [part.requires_grad_() for part in inputs(40)]
    o, _ = operators.wkv4(*x, segments=packed(B, [13], 40))
    grads = torch.autograd.grad(o[:, 13:].sum(), x[:2])
    assert all((grad[:, :13] == 0).all() for grad in grads)


def test_continues_from_its_state():
    k, v, decay, bonus = inputs(50)
    whole, end = wkv4(k, v, decay, bonus)
    head, state = wkv4(k[:, :21], v[:, :21], decay, bonus)
    tail, last = wkv4(k[:, 21:], v[:, 21:], decay, bonus, state_B2D=state)
    assert_same([torch.cat([head, tail], dim=1), last], [whole, end])


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_float32(spread: float):
    x, state = [part.float() for part in inputs(100, spread)], draw(5, B, 2, D).float()
    assert_as_exact(operators.wkv4, reference.wkv4, x, first=state)
    assert_as_exact(operators.wkv4, reference.wkv4, x, segments=packed(B, [1, 40], 100))


def test_keys_out_of_range_stay_finite():
    x = [part.float() for part in inputs(70, 1e6)]
    o, final, *grads = results(operators.wkv4, x, None, None)
    assert all(found.isfinite().all() for found in (o, final, *grads))


def test_half_precision_keeps_the_dtype():
    o, state = wkv4(*(x.bfloat16() for x in inputs(20)))
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32


def test_empty_batch():
    k, v, decay, bonus = inputs(5)
    o, state = wkv4(k[:0], v[:0], decay, bonus)
    assert o.shape == (0, 5, D)
    assert state.shape == (0, 2, D)


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [(0, (B, 4, D), "k .* and v"), (1, (B, 5), "k .* and v"), (2, (D + 1,), "decay"), (3, (1, D), "bonus")],
)
def test_shapes_that_do_not_fit(place: int, shape: tuple[int, ...], message: str):
    x = inputs(5)
    x[place] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ConfigError, match=message):
        wkv4(*x)


def test_no_token():
    k, v, decay, bonus = inputs(5)
    with pytest.raises(ConfigError, match="at least one token"):
        wkv4(k[:, :0], v[:, :0], decay, bonus)
