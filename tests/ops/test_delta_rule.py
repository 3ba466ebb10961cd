"""The chunked delta rule against its definition in float64."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.delta_rule import delta_rule, eager, fla_kernels, reference
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate


def inputs(B: int, T: int, H: int, K: int, V: int, strength: float = 1.0) -> list[Tensor]:
    """q, k of norm 1, v, beta in (0, 1), log decay, state."""
    generator = torch.Generator().manual_seed(T + H + K)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    tensors = [q, k, draw(B, T, H, V), draw(B, T, H).sigmoid(), -strength * draw(B, T, H).abs(), draw(B, H, K, V)]
    return [x.requires_grad_() for x in tensors]


def packed(B: int, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return (torch.rand(B, T, generator=generator) < 0.15).cumsum(1)


def values_and_gradients(function, tensors: list[Tensor], segments: Tensor | None = None) -> list[Tensor]:
    o, state = function(*tensors, segments)
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (o, state)]
    return [o, state, *torch.autograd.grad([o, state], tensors, seeds)]


@pytest.mark.parametrize("T", [1, 2, 7, 16, 33, 70])
@pytest.mark.parametrize("segmented", [False, True])
def test_chunks_equal_the_definition(T: int, segmented: bool):
    tensors = inputs(2, T, 3, 5, 4)
    segments = packed(2, T) if segmented else None
    expected = values_and_gradients(reference.delta_rule, tensors, segments)
    found = values_and_gradients(lambda *x: eager.delta_rule(*x, chunk=8), tensors, segments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strength", [0.0, 0.01, 1.0, 100.0])
def test_float32_is_as_good_as_the_recurrence_in_float32(strength: float):
    exact = inputs(1, 150, 2, 8, 4, strength)
    single = [x.detach().float().requires_grad_() for x in exact]
    expected = values_and_gradients(reference.delta_rule, exact)
    recurrent = values_and_gradients(reference.delta_rule, single)
    chunked = values_and_gradients(eager.delta_rule, single)
    for number, (a, b, truth) in enumerate(zip(chunked, recurrent, expected, strict=True)):
        assert_as_accurate(f"result {number}", a, b, truth)


def test_no_decay_is_a_decay_of_one():
    q, k, v, beta, log_decay, state = inputs(2, 40, 2, 6, 5)
    plain = delta_rule(q, k, v, beta, state_BHKV=state)
    gated = delta_rule(q, k, v, beta, torch.zeros_like(log_decay), state_BHKV=state)
    for a, b in zip(plain, gated, strict=True):
        assert torch.equal(a, b)


def test_orthogonal_keys_make_it_linear_attention():
    # Where no key overlaps another there is nothing to correct.
    q, _, v, beta, _, _ = inputs(1, 12, 1, 12, 5)
    k = torch.eye(12, dtype=torch.float64)[None, :, None]
    o, _ = delta_rule(q, k, v, beta)
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril()
    torch.testing.assert_close(o, torch.einsum("bhts,bsh,bshv->bthv", weights, beta, v))


def test_strength_one_overwrites():
    # Writing twice under one key leaves the second value alone (arXiv 2406.06484, section 2.2).
    _, k, v, _, _, _ = inputs(1, 2, 1, 4, 3)
    k = k[:, :1].expand(-1, 2, -1, -1)
    o, _ = delta_rule(k, k, v, torch.ones(1, 2, 1, dtype=torch.float64))
    torch.testing.assert_close(o, v)


@pytest.mark.parametrize("lengths", [(30, 40), (1, 69), (69, 1)])
def test_a_sequence_can_be_read_in_pieces(lengths: tuple[int, int]):
    *tensors, state = inputs(2, 70, 2, 5, 3)
    o, final = delta_rule(*tensors, state_BHKV=state)
    outputs = []
    for piece in zip(*(x.split(lengths, dim=1) for x in tensors), strict=True):
        part, state = delta_rule(*piece, state_BHKV=state)
        outputs.append(part)
    torch.testing.assert_close(torch.cat(outputs, dim=1), o)
    torch.testing.assert_close(state, final)


def test_bfloat16_keeps_a_float32_state_also_under_autocast():
    tensors = [x.detach().bfloat16() for x in inputs(1, 70, 2, 8, 4)]
    o, state = delta_rule(*tensors[:5])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o_cast, state_cast = delta_rule(*tensors[:5])
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert torch.equal(o, o_cast)
    assert torch.equal(state, state_cast)


def test_decays_may_be_of_float16():
    q, k, v, beta, log_decay, _ = (x.detach().float() for x in inputs(1, 40, 2, 8, 4))
    low = log_decay.half()
    low[:, 7], low[:, 20:22] = -torch.inf, torch.finfo(torch.float16).min
    low.requires_grad_()
    o, state = delta_rule(q, k, v, beta, low, backend="eager")
    exact, last = reference.delta_rule(*(x.double() for x in (q, k, v, beta, low)))
    torch.testing.assert_close(o, exact.float())
    torch.testing.assert_close(state, last.float())
    assert torch.autograd.grad(o.sum() + state.sum(), low)[0].isfinite().all()


def test_kernels_that_cannot_run_are_refused_or_replaced():
    tensors = inputs(1, 5, 1, 4, 3)[:5]
    with pytest.raises(ConfigError, match=r"no kernels for torch\.float64|triton is not installed"):
        delta_rule(*tensors, backend="triton")
    with pytest.raises(ConfigError, match="did you mean 'eager'"):
        delta_rule(*tensors, backend="eagre")
    for a, b in zip(delta_rule(*tensors), delta_rule(*tensors, backend="eager"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=requires_gpu)])
def test_library_is_as_accurate_as_the_recurrence(device: str, decayed: bool):
    low = [x.detach().to(device, torch.bfloat16) for x in inputs(2, 500, 2, 96, 192, 0.1)[: 5 if decayed else 4]]
    if reason := fla_kernels.unsupported(low[2], None):
        pytest.skip(reason)

    def run(function, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in low]
        o, _ = function(*leaves)
        weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(o)
        return [o.detach(), *torch.autograd.grad(o, leaves, weight)]

    exact = run(reference.delta_rule, torch.float64)
    plain = run(reference.delta_rule, torch.bfloat16)
    decay = [] if decayed else [None]
    found = run(lambda *x: fla_kernels.delta_rule(*x, *decay, None, None), torch.bfloat16)
    for number, (a, b, truth) in enumerate(zip(found, plain, exact, strict=True)):
        assert_as_accurate(f"result {number}", a, b, truth)


@pytest.mark.parametrize("wrong", ["k", "v", "beta", "log_decay", "empty"])
def test_shapes_that_do_not_fit_are_refused(wrong: str):
    names = ["q", "k", "v", "beta", "log_decay"]
    tensors = dict(zip(names, inputs(1, 4, 2, 3, 3), strict=False))
    if wrong == "empty":
        tensors = {name: x[:, :0] for name, x in tensors.items()}
    else:
        tensors[wrong] = tensors[wrong][:, 1:]
    with pytest.raises(ConfigError, match="token" if wrong == "empty" else wrong):
        delta_rule(*tensors.values())
