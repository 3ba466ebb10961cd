"""The chunked Triton kernels of wkv6: through the interpreter in float32, on a GPU in every dtype."""

import pytest
import torch
from torch import Tensor

from basecap.ops._dispatch import interpreted
from basecap.ops._recurrence.blocks import starts
from basecap.ops.wkv6 import eager, reference, triton_chunks, wkv6
from basecap.ops.wkv6.triton_chunks import operators
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._recurrences import assert_as_exact, draw, packed, results

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])

#: B, T, H, K, V; several programs take the values of the last.
SIZES = [(2, 1, 1, 3, 2), (2, 37, 2, 8, 5), (1, 150, 1, 40, 20), (1, 64, 2, 16, 16), (2, 40, 2, 8, 96)]
HALF_SIZES = [(2, 500, 3, 64, 64), (1, 200, 2, 100, 48), (2, 300, 2, 128, 128), (1, 70, 2, 64, 192), (2, 7, 1, 20, 9)]
#: Mean log decays, and how they spread.
DECAYS = {
    "weak": (1e-3, 0.5),
    "middling": (1.0, 0.5),
    "strong": (30.0, 0.5),
    "mixed": (0.3, 3.0),
    "breaks": (1e-3, 0.5),
}


def inputs(sizes: tuple[int, ...], decays: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """r, k, v in `dtype`; log decay and bonus in float32."""
    B, T, H, K, V = sizes
    mean, spread = DECAYS[decays]
    log_decay = -mean * torch.exp(spread * draw(3, B, T, H, K))
    if decays == "breaks":
        log_decay[:, 20::37] = -1e5
    low = [draw(0, B, T, H, K), draw(1, B, T, H, K), draw(2, B, T, H, V)]
    return [x.to(device, dtype) for x in low] + [x.to(device, torch.float32) for x in (log_decay, draw(4, H, K))]


def first_state(sizes: tuple[int, ...], device: str) -> Tensor:
    B, _, H, K, V = sizes
    return draw(5, B, H, K, V).to(device, torch.float32)


def public(*args):
    """Run the op's Triton kernels by the definition's positions."""
    *given, state, segments = args
    return wkv6(*given, state_BHKV=state, segments=segments, backend="triton")


def assert_kernels(tensors: list[Tensor], state: Tensor | None = None, segments: Tensor | None = None) -> None:
    """Compare outputs, state and gradients with the definition in float64, their errors with the eager path's."""
    dtype = tensors[2].dtype
    wide = None if state is None else state.double()
    truth = results(reference.wkv6, [x.double() for x in tensors], wide, segments)
    plain = results(eager.wkv6, tensors, state, segments)
    found = results(triton_chunks.wkv6, tensors, state, segments)
    for number, (x, y, z) in enumerate(zip(found, plain, truth, strict=True)):
        assert x.dtype == y.dtype
        # Products are taken in the dtype of v: no gradient, whatever its dtype, is better than that. States are.
        exact = number == 1
        assert_as_accurate(f"result {number}", x if exact else x.to(dtype), y if exact else y.to(dtype), z)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize(("sizes", "started"), [*zip(SIZES, [False, True, False, True, True], strict=True)])
def test_kernels_are_as_accurate_as_eager(device: str, sizes: tuple[int, ...], started: bool):
    first = first_state(sizes, device) if started else None
    assert_kernels(inputs(sizes, "middling", device, torch.float32), first)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize("decays", DECAYS)
def test_any_decay(device: str, decays: str):
    sizes = 1, 100, 1, 20, 16
    assert_kernels(inputs(sizes, decays, device, torch.float32), first_state(sizes, device))


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize("cuts", [[1, 31, 32, 33, 70], range(1, 90, 2)])
def test_packed_rows(device: str, cuts: list[int]):
    sizes = 2, 90, 1, 8, 8
    tensors = inputs(sizes, "weak", device, torch.float32)
    assert_kernels(tensors, first_state(sizes, device), packed(2, cuts, 90).to(device))


@anywhere
def test_a_decay_that_leaves_nothing_has_no_gradient(device: str):
    tensors = inputs((1, 50, 1, 8, 8), "weak", device, torch.float32)
    tensors[3][:, [3, 40]] = -torch.inf
    *_, dlog_decay, _ = results(triton_chunks.wkv6, tensors, None, None)
    assert torch.isfinite(dlog_decay).all()
    assert not dlog_decay[:, [3, 40]].any()
    assert dlog_decay[:, 1:3].all()


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", HALF_SIZES)
@pytest.mark.parametrize("decays", DECAYS)
def test_half_precision(device: str, dtype: torch.dtype, sizes: tuple[int, ...], decays: str):
    tensors, first = inputs(sizes, decays, device, dtype), first_state(sizes, device)
    assert_kernels(tensors, first)
    assert_kernels(tensors, first, packed(sizes[0], range(5, sizes[1], 90), sizes[1]).to(device))


@pytest.mark.usefixtures("poisoned")
@in_interpreter
@pytest.mark.parametrize("decays", ["weak", "mixed", "breaks"])
def test_chunks_of_half_precision(decays: str):
    """Sequences are twice as long as in float32. The interpreter computes float16 correctly, and bfloat16 not."""
    sizes = 1, 150, 1, 20, 16
    segments = packed(1, [64, 100], 150)
    assert_kernels(inputs(sizes, decays, "cpu", torch.float16), first_state(sizes, "cpu"), segments)


@anywhere
@pytest.mark.parametrize("broadcast", [(1, 1), (2, 1), (1, 40)])
def test_broadcast_decays(device: str, broadcast: tuple[int, int]):
    """A decay shared by rows or tokens (RWKV-5: by all) gets its whole gradient, through the public op."""
    tensors = inputs((2, 40, 2, 6, 6), "middling", device, torch.float32)
    tensors[3] = tensors[3][: broadcast[0], : broadcast[1]]

    assert_as_exact(public, eager.wkv6, tensors)


@anywhere
@pytest.mark.parametrize("sizes", [(1, 5, 1, 130, 4), (1, 5, 1, 4, 130), (2, 1, 2, 8, 8)])
def test_the_recurrence_takes_the_rest(device: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """Wide heads and single tokens do not go by chunks."""
    monkeypatch.setattr(operators, "scan", None)
    tensors = inputs(sizes, "middling", device, torch.float32)
    assert_as_exact(public, reference.wkv6, tensors, first=first_state(sizes, device))


@anywhere
def test_decays_and_bonus_of_any_dtype(device: str):
    tensors = inputs((1, 40, 1, 8, 8), "middling", device, torch.float32)
    expected = results(triton_chunks.wkv6, tensors, None, None)
    for dtype in (torch.float16, torch.float64):
        *most, log_decay, bonus = tensors
        given = [*most, log_decay.to(dtype), bonus.to(dtype)]
        found = results(triton_chunks.wkv6, given, None, None)
        assert [x.dtype for x in found[-2:]] == [dtype, dtype]
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.float(), y, rtol=1e-2, atol=1e-2)


@anywhere
def test_the_outputs_alone_and_the_state_alone_have_gradients(device: str):
    sizes = 1, 40, 1, 8, 8
    leaves = [
        x.requires_grad_() for x in (*inputs(sizes, "middling", device, torch.float32), first_state(sizes, device))
    ]
    o, final = triton_chunks.wkv6(*leaves, None)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = reference.wkv6(*wide)
    for x, y in zip((o, final), exact, strict=True):
        grads = torch.autograd.grad(x.sum(), leaves, retain_graph=True)
        truth = torch.autograd.grad(y.sum(), wide, retain_graph=True, materialize_grads=True)
        for found, true in zip(grads, truth, strict=True):
            torch.testing.assert_close(found.double(), true, rtol=1e-4, atol=1e-4)


@anywhere
def test_nothing_else_leaks_into_the_results(device: str):
    """Other rows, heads, segments and later tokens change nothing, bit by bit."""
    sizes = 2, 70, 2, 16, 16
    *tensors, bonus = inputs(sizes, "weak", device, torch.float32)
    first = first_state(sizes, device)
    segments = (torch.arange(70, device=device) >= 33).long().expand(2, 70)
    o, _ = wkv6(*tensors, bonus, state_BHKV=first, segments=segments, backend="triton")
    others = [x * 1000 for x in (*tensors, bonus)]
    for x, y in zip(others, (*tensors, bonus), strict=True):
        kept = (slice(1, None), slice(33, 60), slice(1, None)) if x.dim() == 4 else (slice(1, None),)
        x[kept] = y[kept]
    changed, _ = wkv6(*others, state_BHKV=1000 * first, segments=segments, backend="triton")
    assert torch.equal(o[1, 33:60, 1], changed[1, 33:60, 1])
    assert not torch.isclose(o, changed)[:, :33].any()


@in_interpreter
def test_values_in_parts_share_what_is_kept_of_their_keys():
    """Neither keys nor scores are repeated for each part of wide values, which compute the same bits as heads do."""
    sizes = 1, 40, 2, 8, 96
    r, k, v, log_decay, bonus = inputs(sizes, "middling", "cpu", torch.float32)
    kept: list[Tensor] = []
    leaves = [x.requires_grad_() for x in (r, k, v, log_decay, bonus)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o, _ = triton_chunks.wkv6(*leaves, None, None)
    shapes = sorted(tuple(x.shape) for x in kept)
    assert shapes == sorted([*[(1, 40, 2, 8)] * 3, (1, 40, 4, 48), (2, 8), (1, 2, 4, 8, 48), (1, 2, 2, 32, 32)])
    halves = [wkv6(r, k, half, log_decay, bonus, backend="triton")[0] for half in v.split(48, dim=-1)]
    assert torch.equal(o, torch.cat(halves, dim=-1))


@anywhere
@pytest.mark.parametrize("segmented", [False, True])
def test_the_operator_keeps_its_promises(device: str, segmented: bool):
    sizes = 1, 20, 1, 8, 8
    tensors = [x.requires_grad_() for x in (*inputs(sizes, "weak", device, torch.float32), first_state(sizes, device))]
    new = starts(packed(1, [7], 20).to(device)) if segmented else None
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    results = torch.library.opcheck(operators.scan.overload, (*tensors, new), test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}
