"""Chunked Taylor attention against its definition in float64."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.taylor_attention import eager, reference, taylor_attention, taylor_state


def inputs(B: int, T: int, H: int, K: int, V: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T + H + K)
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def packed(B: int, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return (torch.rand(B, T, generator=generator) < 0.15).cumsum(1)


def value_and_gradients(function, tensors: list[Tensor]) -> list[Tensor]:
    o = function(*tensors)
    seed = torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(o)
    return [o, *torch.autograd.grad(o, tensors, seed)]


@pytest.mark.parametrize("T", [1, 2, 7, 16, 33, 70])
@pytest.mark.parametrize("segmented", [False, True])
def test_chunks_equal_the_definition(T: int, segmented: bool):
    tensors = inputs(2, T, 3, 5, 4)
    segments = packed(2, T) if segmented else None
    expected = value_and_gradients(lambda *x: reference.taylor_attention(*x, segments), tensors)
    found = value_and_gradients(lambda *x: eager.taylor_attention(*x, segments=segments, chunk=8), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_float32_is_as_good_as_the_definition_in_float32():
    exact = inputs(1, 300, 2, 16, 8)
    single = [x.detach().float().requires_grad_() for x in exact]
    expected = value_and_gradients(reference.taylor_attention, exact)
    dense = value_and_gradients(reference.taylor_attention, single)
    chunked = value_and_gradients(taylor_attention, single)
    for a, b, truth in zip(chunked, dense, expected, strict=True):
        assert (a - truth).abs().max() <= 2 * (b - truth).abs().max() + 1e-6 * truth.abs().max()


def test_features_expand_the_exponential():
    # The weight is exp's Taylor polynomial of degree 2, so it differs from exp by the third order.
    q, k = 0.1 * torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (q * k).sum(-1) / 4
    weight = (eager.features(q) * eager.features(k)).sum(-1)
    torch.testing.assert_close(weight, 1 + x + x**2 / 2)
    assert ((weight - x.exp()).abs() <= x.abs() ** 3).all()


def test_it_is_linear_attention_with_the_features_of_the_paper():
    # The paper's map keeps x_i x_j and x_j x_i apart: 1 + K + K^2 features (section 4.1).
    q, k, v = inputs(2, 20, 2, 6, 3)

    def paper(x: Tensor) -> Tensor:
        squares = (x[..., :, None] * x[..., None, :]).flatten(-2) / (2**0.5 * 6**0.5)
        return torch.cat([torch.ones_like(x[..., :1]), x / 6**0.25, squares], dim=-1)

    fq, fk = paper(q), paper(k)
    sums = torch.einsum("bthf,bthv->bthfv", fk, v).cumsum(1)
    o = torch.einsum("bthf,bthfv->bthv", fq, sums) / torch.einsum("bthf,bthf->bth", fq, fk.cumsum(1))[..., None]
    torch.testing.assert_close(taylor_attention(q, k, v), o)


@pytest.mark.parametrize("lengths", [(130, 70), (1, 199), (199, 1)])
def test_a_sequence_can_be_read_in_pieces(lengths: tuple[int, int]):
    tensors = inputs(2, 200, 2, 4, 3)
    first, second = zip(*(x.split(lengths, dim=1) for x in tensors), strict=True)
    state = taylor_state(*first[1:])
    pieces = [taylor_attention(*first), taylor_attention(*second, state_BHFX=state)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), taylor_attention(*tensors))
    torch.testing.assert_close(taylor_state(*second[1:], state), taylor_state(*tensors[1:]))


def test_bfloat16_sums_in_float32_also_under_autocast():
    q, k, v = (x.detach().bfloat16() for x in inputs(1, 200, 2, 8, 4))
    o, state = taylor_attention(q, k, v), taylor_state(k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(taylor_attention(q, k, v), o)
        assert torch.equal(taylor_state(k, v), state)
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32


@pytest.mark.parametrize("wrong", ["k", "v", "token"])
def test_shapes_that_do_not_fit_are_refused(wrong: str):
    q, k, v = inputs(1, 4, 2, 3, 3)
    broken = {"k": (q, k[:, 1:], v), "v": (q, k, v[:, 1:]), "token": (q[:, :0], k[:, :0], v[:, :0])}
    with pytest.raises(ConfigError, match=wrong):
        taylor_attention(*broken[wrong])
