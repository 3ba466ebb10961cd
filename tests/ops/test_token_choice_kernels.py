"""The Triton kernels of the choice of tokens: through the interpreter in float32, on a GPU in every dtype."""

import importlib
from functools import partial

import pytest
import torch
from torch import Tensor

from basecap.ops._dispatch import interpreted
from basecap.ops.token_choice import (
    choose_by_index,
    choose_by_mass,
    index_divergence,
    mass,
    operators,
    reference,
    triton_kernels,
)
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._recurrences import draw, packed

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])

#: Heads of the indexer, of attention's queries and of its keys.
X, H, G = 3, 4, 2


def inputs(B: int, T: int, J: int, K: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(B, T, X, J), (B, T, J), (B, T, X), (B, T, H, K), (B, T, G, K)]
    return [draw(i, *shape).to(device, dtype) for i, shape in enumerate(shapes)]


def exactly(x: Tensor) -> Tensor:
    """Return numbers of few digits, whose scores are exact in every order of sums, and often equal."""
    return (2 * x.float()).round().to(x.dtype) / 2


def assert_chosen(chosen: Tensor, scores: Tensor, seen: Tensor, top: int, slack: float) -> None:
    """Whether each query reads as many tokens as it may, none of which scores clearly less than one it does not."""
    assert not (chosen & ~seen).any()
    assert torch.equal(chosen.sum(-1), seen.sum(-1).clamp(max=top))
    least = scores.masked_fill(~chosen, torch.inf).amin(-1)
    assert (scores.masked_fill(chosen | ~seen, -torch.inf).amax(-1) <= least + slack * least.abs()).all()


def results(loss, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    value = loss(*leaves, *tensors[3:])
    return [value.detach(), *torch.autograd.grad(value * 100, leaves)]


def assert_loss(tensors: list[Tensor], chosen: Tensor | None, segments: Tensor | None) -> None:
    seen = reference.seen(tensors[0], segments) if chosen is None else chosen
    exact = results(partial(reference.divergence, seen_BTT=seen), [x.double() for x in tensors])
    plain, found = (
        results(partial(index_divergence, chosen_BTT=chosen, segments=segments, backend=backend), tensors)
        for backend in ("eager", "triton")
    )
    for name, a, b, truth in zip(("loss", "dq", "dk", "dweights"), found, plain, exact, strict=True):
        assert_as_accurate(name, a, b, truth)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize(("length", "J", "K", "top"), [(1, 8, 20, 3), (70, 20, 8, 12)])
def test_kernels_are_as_accurate_as_eager(device: str, length: int, J: int, K: int, top: int):
    tensors = inputs(2, length, J, K, device)
    tensors[:3] = [exactly(x) for x in tensors[:3]]
    segments = packed(2, [33], length).to(device) if length > 33 else None
    chosen = choose_by_index(*tensors[:3], top, segments=segments, backend="triton")
    assert torch.equal(chosen, choose_by_index(*tensors[:3], top, segments=segments, backend="eager"))
    assert_loss(tensors, None, segments)
    assert_loss(tensors, chosen, segments)
    q, k = tensors[3:]
    seen = reference.seen(q, segments)
    by_mass = choose_by_mass(q, k, top, segments=segments, backend="triton")
    assert_chosen(by_mass, reference.mass(q.double(), k.double(), seen), seen, top, 1e-5)


@anywhere
def test_a_zero_has_no_sign_and_the_latest_of_equal_scores_are_chosen(device: str):
    q, k, _, *_ = inputs(1, 40, 16, 16, device)
    signs = (torch.arange(40, device=device) % 3 - 1)[None, :, None]
    weights = signs * torch.tensor([-1.0, -2.0, 1e-30], device=device)
    found = choose_by_index(exactly(q), -exactly(k).abs(), weights, 7, backend="triton")
    assert torch.equal(found, choose_by_index(exactly(q), -exactly(k).abs(), weights, 7, backend="eager"))
    same = choose_by_index(0 * q, k, weights, 7, backend="triton")
    assert torch.equal(same, torch.ones_like(same).tril().triu(-6))


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize(("pairs", "parts"), [(2 * 40**2, 2), (32 * 40, 6)], ids=["rows", "queries"])
def test_parts_of_the_scores_give_the_same(device: str, pairs: int, parts: int, monkeypatch: pytest.MonkeyPatch):
    tensors = [exactly(x) for x in inputs(3, 40, 8, 8, device)]
    launch = importlib.import_module("basecap.ops.token_choice.triton_kernels.launch")

    def run() -> list[Tensor]:
        loss = partial(index_divergence, backend="triton")
        return [choose_by_mass(*tensors[3:], 9, backend="triton"), *results(loss, tensors)]

    expected = run()
    monkeypatch.setattr(launch, "PAIRS", pairs)
    monkeypatch.setattr(launch, "QUERIES", 32)
    assert len(launch._parts(3, 40)) == parts
    torch.testing.assert_close(run(), expected)


@anywhere
def test_operators(device: str):
    index, heads = inputs(1, 9, 8, 8, device)[:3], inputs(1, 9, 8, 8, device)[3:]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, given in (
        (operators.choose_by_index, (*index, None, 4, "triton_kernels")),
        (operators.choose_by_mass, (*heads, None, 4, "triton_kernels")),
        (operators.diverge, (*(x.requires_grad_() for x in index), heads, None, None, True, "triton_kernels")),
    ):
        found = torch.library.opcheck(operator.overload, given, test_utils=checks)
        assert set(found.values()) == {"SUCCESS"}


@dtypes
@pytest.mark.parametrize("over", ["visible", "chosen"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("device", [on_gpu])
def test_kernels_at_size(device: str, documents: bool, over: str, dtype: torch.dtype):
    tensors = inputs(2, 2048, 64, 64, device, dtype)
    segments = packed(2, [700, 1500], 2048).to(device) if documents else None
    seen = reference.seen(tensors[0], segments)
    wide = [x.double() for x in tensors]
    chosen = choose_by_index(*tensors[:3], 64, segments=segments, backend="triton")
    assert_chosen(chosen, reference.index_scores(*wide[:3]), seen, 64, 1e-4)
    by_mass = choose_by_mass(*tensors[3:], 64, segments=segments, backend="triton")
    assert_chosen(by_mass, reference.mass(*wide[3:], seen), seen, 64, 1e-4)
    assert (by_mass == choose_by_mass(*tensors[3:], 64, segments=segments, backend="eager")).float().mean() > 0.9999
    assert_loss(tensors, chosen if over == "chosen" else None, segments)


def test_what_they_cannot_do_is_said():
    long = torch.empty(1, dtype=torch.float32).expand(1, 40_000, 2, 64)
    assert triton_kernels.supports(long) == "the kernels take at most 32,768 tokens, not 40,000"
    assert mass(long[:, :1], long[:, :1], torch.ones(1, 1, 1, dtype=torch.bool)).shape == (1, 1, 1)
