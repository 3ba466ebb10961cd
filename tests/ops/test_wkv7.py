"""The recurrence of RWKV-7: the chunked path against the definition."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.wkv7 import eager, reference, wkv7
from tests.ops._recurrences import assert_as_exact, assert_same, draw, packed, results

B, H, K, V = 2, 3, 8, 6


def inputs(length: int, spread: float = 1.0) -> list[Tensor]:
    """r, log decay, k, v, a, b as RWKV-7 makes them: b is minus a times a rate in 0..1."""
    log_decay = -torch.exp(spread * draw(1, B, length, H, K))
    a = -F.normalize(draw(4, B, length, H, K), dim=-1)
    b = -a * draw(5, B, length, H, K).sigmoid()
    return [draw(0, B, length, H, K), log_decay, draw(2, B, length, H, K), draw(3, B, length, H, V), a, b]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 75])
def test_definition(length: int):
    x, state = inputs(length, 2.0), draw(6, B, H, K, V)
    assert_same(results(eager.wkv7, x, state, None), results(reference.wkv7, x, state, None))
    assert_same(results(eager.wkv7, x, None, None), results(reference.wkv7, x, None, None))


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunk_size_does_not_matter(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "CHUNK", chunk)
    x, state = inputs(37), draw(6, B, H, K, V)
    assert_same(results(eager.wkv7, x, state, None), results(reference.wkv7, x, state, None))


def test_segments():
    x, state = inputs(75), draw(6, B, H, K, V)
    segments = packed(B, [1, 6, 7, 32, 50], 75)
    assert_same(results(eager.wkv7, x, state, segments), results(reference.wkv7, x, state, segments))


def test_no_gradient_crosses_segments():
    x = [part.requires_grad_() for part in inputs(40)]
    o, _ = eager.wkv7(*x, segments=packed(B, [13], 40))
    grads = torch.autograd.grad(o[:, 13:].sum(), x)
    assert all((grad[:, :13] == 0).all() for grad in grads)


def test_continues_from_its_state():
    x = inputs(50)
    whole, end = wkv7(*x)
    head, state = wkv7(*(part[:, :21] for part in x))
    tail, last = wkv7(*(part[:, 21:] for part in x), state_BHKV=state)
    assert_same([torch.cat([head, tail], dim=1), last], [whole, end])


def test_delta_rule():
    """No decay, a = -k, b = beta k and keys scaled by beta: S_t = S_{t-1} + beta k (v - S_{t-1}^T k)^T."""
    q, _, k, v, _, _ = inputs(45)
    k = F.normalize(k, dim=-1)
    beta = draw(8, B, 45, H, 1).sigmoid()
    state = torch.zeros(B, H, K, V, dtype=torch.float64)
    expected = []
    for t in range(45):
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", beta[:, t] * k[:, t], error)
        expected.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    o, final = wkv7(q, torch.zeros_like(k), beta * k, v, -k, beta * k)
    assert_same([o, final], [torch.stack(expected, dim=1), state])


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_float32(spread: float):
    x, state = [part.float() for part in inputs(100, spread)], draw(6, B, H, K, V).float()
    assert_as_exact(eager.wkv7, reference.wkv7, x, first=state)
    assert_as_exact(eager.wkv7, reference.wkv7, x, segments=packed(B, [1, 40], 100))


def test_extreme_decays_stay_finite():
    x = [part.float() for part in inputs(70)]
    x[1] = torch.where(draw(7, B, 70, H, K) > 1, -1e30, -1e-30).float()
    x[1][:, 33] = -torch.inf
    assert all(found.isfinite().all() for found in results(eager.wkv7, x, None, None))


def test_half_precision_keeps_the_dtype():
    o, state = wkv7(*(x.bfloat16() for x in inputs(20)))
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32


def test_empty_batch():
    o, state = wkv7(*(x[:0] for x in inputs(5)))
    assert o.shape == (0, 5, H, V)
    assert state.shape == (0, H, K, V)


@pytest.mark.parametrize(
    ("place", "message"), [(1, "log_decay"), (2, "k .* must"), (3, "v .* must be"), (4, "a .* must"), (5, "b .* must")]
)
def test_shapes_that_do_not_fit(place: int, message: str):
    x = inputs(5)
    x[place] = x[place][:, :4]
    with pytest.raises(ConfigError, match=message):
        wkv7(*x)


def test_no_token():
    with pytest.raises(ConfigError, match="at least one token"):
        wkv7(*(x[:, :0] for x in inputs(5)))
