"""The recurrence of RWKV-5 and RWKV-6: the chunked path against the definition."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.wkv6 import eager, reference, wkv6
from tests.ops._recurrences import assert_as_exact, assert_same, draw, packed, results

B, H, K, V = 2, 3, 8, 6


def inputs(length: int, spread: float = 1.0) -> list[Tensor]:
    """r, k, v, log decay, bonus; with `spread` 3 the decays reach from exp(-1e-4) to exp(-1e4)."""
    log_decay = -torch.exp(spread * draw(3, B, length, H, K))
    return [draw(0, B, length, H, K), draw(1, B, length, H, K), draw(2, B, length, H, V), log_decay, draw(4, H, K)]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 75])
def test_definition(length: int):
    x, state = inputs(length, 2.0), draw(5, B, H, K, V)
    assert_same(results(eager.wkv6, x, state, None), results(reference.wkv6, x, state, None))
    assert_same(results(eager.wkv6, x, None, None), results(reference.wkv6, x, None, None))


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunk_size_does_not_matter(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "CHUNK", chunk)
    x, state = inputs(37), draw(5, B, H, K, V)
    assert_same(results(eager.wkv6, x, state, None), results(reference.wkv6, x, state, None))


def test_segments():
    x, state = inputs(75), draw(5, B, H, K, V)
    segments = packed(B, [1, 6, 7, 32, 50], 75)
    assert_same(results(eager.wkv6, x, state, segments), results(reference.wkv6, x, state, segments))


def test_no_gradient_crosses_segments():
    x = [part.requires_grad_() for part in inputs(40)]
    o, _ = eager.wkv6(*x, segments=packed(B, [13], 40))
    grads = torch.autograd.grad(o[:, 13:].sum(), x[:4])
    assert all((grad[:, :13] == 0).all() for grad in grads)


def test_constant_decay_broadcasts():
    r, k, v, log_decay, bonus = inputs(40)
    constant = log_decay[:1, :1]
    full = constant.expand_as(log_decay)
    assert_same(wkv6(r, k, v, constant, bonus), wkv6(r, k, v, full, bonus))
    leaves = [x.detach().clone().requires_grad_() for x in (constant, full)]
    narrow, wide = (torch.autograd.grad(wkv6(r, k, v, x, bonus)[0].square().sum(), x)[0] for x in leaves)
    torch.testing.assert_close(narrow, wide.sum((0, 1), keepdim=True))


def test_continues_from_its_state():
    x = inputs(50)
    whole, end = wkv6(*x)
    head, state = wkv6(*(part[:, :21] for part in x[:4]), x[4])
    tail, last = wkv6(*(part[:, 21:] for part in x[:4]), x[4], state_BHKV=state)
    assert_same([torch.cat([head, tail], dim=1), last], [whole, end])


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_float32(spread: float):
    x, state = [part.float() for part in inputs(100, spread)], draw(5, B, H, K, V).float()
    assert_as_exact(eager.wkv6, reference.wkv6, x, first=state)
    assert_as_exact(eager.wkv6, reference.wkv6, x, segments=packed(B, [1, 40], 100))


def test_extreme_decays_stay_finite():
    r, k, v, _, bonus = (x.float() for x in inputs(70))
    log_decay = torch.where(draw(7, B, 70, H, K) > 1, -1e30, -1e-30).float()
    log_decay[:, 33] = -torch.inf
    found = results(eager.wkv6, [r, k, v, log_decay, bonus], None, None)
    assert all(x.isfinite().all() for x in found)


def test_half_precision_keeps_the_dtype():
    o, state = wkv6(*(x.bfloat16() for x in inputs(20)))
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32


def test_empty_batch():
    o, state = wkv6(*(x[:0] for x in inputs(5)[:4]), inputs(5)[4])
    assert o.shape == (0, 5, H, V)
    assert state.shape == (0, H, K, V)


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (B, 5, H), "r .* and k"),
        (1, (B, 5, H, K + 1), "r .* and k"),
        (2, (B, 4, H, V), "v .* must be"),
        (3, (B, 4, H, K), "log_decay"),
        (4, (H, K + 1), "bonus"),
    ],
)
def test_shapes_that_do_not_fit(place: int, shape: tuple[int, ...], message: str):
    x = inputs(5)
    x[place] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ConfigError, match=message):
        wkv6(*x)


def test_no_token():
    with pytest.raises(ConfigError, match="at least one token"):
        wkv6(*(x[:, :0] for x in inputs(5)[:4]), inputs(5)[4])
