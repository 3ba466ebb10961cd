"""The Triton kernels of wkv7 by chunks: through the interpreter in float32, on a GPU in every dtype."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops import _dispatch
from basecap.ops import wkv7 as package
from basecap.ops._dispatch import interpreted
from basecap.ops.wkv7 import LOWEST, eager, reference, wkv7, wkv7_bounded
from basecap.ops.wkv7.triton_chunks import operators
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._recurrences import draw, packed, results

NAMES = ("o", "state", "dr", "dlog_decay", "dk", "dv", "da", "db", "dstate")
#: Share of the strongest log decay: none, all of it everywhere, or anything.
DECAYS = {"none": 0.0, "strongest": 1.0, "weak": 0.02, "mixed": None}

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])


def inputs(sizes: tuple[int, ...], device: str, dtype: torch.dtype, decays: str = "mixed") -> list[Tensor]:
    """r, log decay, k, v, a, b as RWKV-7 makes them: a of norm 1, b is minus a times a rate in 0..1."""
    B, T, H, K, V = sizes
    share = DECAYS[decays]
    shares = torch.sigmoid(3 * draw(1, B, T, H, K)) if share is None else torch.full((B, T, H, K), share)
    a = -F.normalize(draw(4, B, T, H, K), dim=-1)
    b = -a * draw(5, B, T, H, K).sigmoid()
    r, k, v, a, b = (x.to(device, dtype) for x in (draw(0, B, T, H, K), draw(2, B, T, H, K), draw(3, B, T, H, V), a, b))
    return [r, (LOWEST * shares).to(device, torch.float32), k, v, a, b]


def chunked(*args: Tensor | None) -> tuple[Tensor, Tensor]:
    o, final, *_ = operators.scan(*args)
    return o, final


def assert_kernels(x: list[Tensor], first: Tensor | None = None, segments: Tensor | None = None) -> None:
    """Compare the kernels with the definition in float64, their errors with those of the eager path."""
    truth = results(reference.wkv7, [part.double() for part in x], None if first is None else first.double(), segments)
    expected = results(eager.wkv7, x, first, segments)
    found = results(chunked, x, first, segments)
    dtype = x[3].dtype
    for name, actual, plain, exact in zip(NAMES, found, expected, truth, strict=len(truth) == len(NAMES)):
        assert actual.dtype == plain.dtype
        # The kernels multiply in the dtype of v: no result, whatever its dtype, is better than that.
        assert_as_accurate(name, actual.to(dtype), plain.to(dtype), exact)


def state(sizes: tuple[int, ...], device: str) -> Tensor:
    B, _, H, K, V = sizes
    return draw(9, B, H, K, V).to(device, torch.float32)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize(
    ("sizes", "started"),
    [((2, 1, 1, 3, 2), False), ((2, 16, 1, 8, 8), True), ((2, 37, 2, 6, 20), False), ((1, 50, 1, 72, 66), True)],
)
def test_kernels_are_as_accurate_as_eager(device: str, sizes: tuple[int, ...], started: bool):
    assert_kernels(inputs(sizes, device, torch.float32), state(sizes, device) if started else None)


@anywhere
@pytest.mark.parametrize("decays", DECAYS)
def test_decays_at_their_bounds(device: str, decays: str):
    sizes = (1, 100, 1, 32, 16)
    assert_kernels(inputs(sizes, device, torch.float32, decays), state(sizes, device))


ON_GPU = [pytest.param("cuda", dtype, marks=requires_gpu) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("device", "dtype"), [pytest.param("cpu", torch.float32, marks=in_interpreter), *ON_GPU])
def test_tokens_that_remove_almost_the_same(device: str, dtype: torch.dtype):
    """Removal keys close to each other, rates close to 1 and no decay: the hardest systems to invert."""
    sizes = (1, 100, 1, 64, 16)
    x = inputs(sizes, device, dtype, "none")
    a = -F.normalize(draw(4, 1, 100, 1, 64) + 3 * draw(6, 1, 1, 1, 64), dim=-1)
    rates = (4 + draw(5, 1, 100, 1, 64)).sigmoid()
    x[4:] = [part.to(device, dtype) for part in (a, -a * rates)]
    assert_kernels(x, state(sizes, device))


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize("cuts", [[1, 5, 6, 16, 17, 40, 69], [33], [32, 48]])
def test_packed_rows(device: str, cuts: list[int]):
    sizes = (2, 70, 1, 16, 20)
    segments = packed(2, cuts, 70).to(device)
    assert_kernels(inputs(sizes, device, torch.float32), state(sizes, device), segments)


@in_interpreter
@pytest.mark.parametrize("chunk", [32, 64])
def test_longer_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch):
    """Half precision's chunks compute the same: only the logarithms' digits are fewer."""
    sizes = (1, 100, 1, 64, 16)
    x, segments = inputs(sizes, "cpu", torch.float32, "weak"), packed(1, [10, 70], 100)
    monkeypatch.setitem(operators.CHUNKS, torch.float32, chunk)
    assert_kernels(x, state(sizes, "cpu"))
    assert_kernels(x, state(sizes, "cpu"), segments)


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("sizes", [(2, 300, 3, 64, 64), (1, 200, 2, 128, 96), (2, 77, 2, 40, 128)])
@pytest.mark.parametrize("segmented", [False, True])
def test_every_dtype(device: str, sizes: tuple[int, ...], decays: str, dtype: torch.dtype, segmented: bool):
    cuts = [cut for cut in (1, 63, 64, 70, 190) if cut < sizes[1]]
    segments = packed(sizes[0], cuts, sizes[1]).to(device) if segmented else None
    assert_kernels(inputs(sizes, device, dtype, decays), state(sizes, device), segments)


@pytest.mark.parametrize("device", [on_gpu])
def test_many_programs_agree_with_few(device: str):
    """A full GPU, where programs of all kinds run side by side, computes what each row computes alone, bit by bit."""
    x = inputs((16, 520, 12, 64, 64), device, torch.bfloat16)
    whole = results(chunked, x, None, None)
    torch.testing.assert_close(results(chunked, x, None, None), whole, rtol=0, atol=0)
    alone, _ = chunked(*(part[7:8] for part in x), None, None)
    torch.testing.assert_close(alone, whole[0][7:8], rtol=0, atol=0)


@anywhere
def test_any_dtype_of_the_other_tensors_is_taken(device: str):
    """Every gradient has the dtype of its tensor."""
    sizes = (1, 40, 2, 16, 16)
    r, log_decay, k, v, a, b = inputs(sizes, device, torch.float32)
    x = [r.bfloat16().double(), log_decay.double(), k.bfloat16(), v, a.double(), b.bfloat16()]
    same = [part.float() for part in x]
    for actual, expected in zip(results(chunked, x, None, None), results(chunked, same, None, None), strict=True):
        torch.testing.assert_close(actual, expected.to(actual.dtype))
    assert [grad.dtype for grad in results(chunked, x, None, None)[2:]] == [part.dtype for part in x]


@anywhere
def test_nothing_else_leaks_into_the_results(device: str):
    """Rows, heads and segments by themselves give the same as together."""
    x = inputs((2, 70, 2, 16, 16), device, torch.float32)
    whole, _ = chunked(*x, None, packed(2, [33], 70).to(device))
    alone, _ = chunked(*(part[1:, 33:, 1:] for part in x), None, None)
    torch.testing.assert_close(whole[1:, 33:, 1:], alone)


@anywhere
def test_no_gradient_crosses_segments(device: str):
    x = [part.requires_grad_() for part in inputs((1, 40, 1, 8, 8), device, torch.float32)]
    first = state((1, 40, 1, 8, 8), device).requires_grad_()
    o, _ = chunked(*x, first, packed(1, [21], 40).to(device))
    *grads, dfirst = torch.autograd.grad(o[:, 21:].sum(), [*x, first])
    assert all((grad[:, :21] == 0).all() for grad in grads)
    assert (dfirst == 0).all()


@anywhere
@pytest.mark.parametrize("packs", [False, True])
def test_the_operator_keeps_its_promises(device: str, packs: bool):
    sizes = (1, 20, 1, 8, 4)
    x = [part.requires_grad_() for part in inputs(sizes, device, torch.float32)]
    segments = packed(1, [7], 20).to(device) if packs else None
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    found = torch.library.opcheck(operators.scan.overload, (*x, state(sizes, device), segments), test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


@in_interpreter
def test_bounded_decays_take_the_chunks(monkeypatch: pytest.MonkeyPatch):
    """Half precision of at most 128 channels does; one chunk, wider heads and float32 take the recurrence."""
    for family in (package.triton_chunks, package.triton_tokens):
        monkeypatch.setattr(family, "unsupported_by_triton", lambda x, **_: None)
    monkeypatch.setattr(_dispatch, "_off_the_gpu", lambda x: None)
    called = []
    monkeypatch.setattr(package.triton_chunks, "wkv7", lambda *x: called.append("chunks") or (x[3], None))
    monkeypatch.setattr(package.triton_tokens, "wkv7", lambda *x: called.append("tokens") or (x[3], None))
    half, single = torch.float16, torch.float32
    for T, V, dtype in ((17, 128, half), (16, 8, half), (17, 129, half), (17, 128, single)):
        wkv7_bounded(*inputs((1, T, 1, 8, V), "cpu", dtype))
    wkv7(*inputs((1, 17, 1, 8, 128), "cpu", half))
    assert called == ["chunks", "tokens", "tokens", "tokens", "tokens"]


@in_interpreter
def test_the_public_function_against_the_definition(monkeypatch: pytest.MonkeyPatch):
    """Every argument where it belongs, segments and first state too."""
    monkeypatch.setattr(package, "choose", lambda *given: "triton_chunks")
    sizes = (2, 40, 1, 8, 6)
    x, segments, first = inputs(sizes, "cpu", torch.float16), packed(2, [11, 30], 40), state(sizes, "cpu")
    found = wkv7_bounded(*x, state_BHKV=first, segments=segments)
    expected = reference.wkv7(*(part.double() for part in x), first.double(), segments)
    plain = eager.wkv7(*x, first, segments)
    for name, a, b, truth in zip(("o", "state"), found, plain, expected, strict=True):
        assert_as_accurate(name, a.half(), b.half(), truth)


@anywhere
def test_the_public_function_runs_the_kernels(device: str, monkeypatch: pytest.MonkeyPatch):
    """Also in two parts, with the state carried over, in float64 or not."""
    monkeypatch.setattr(package, "choose", lambda *given: "triton_chunks")
    x = inputs((1, 40, 1, 8, 8), device, torch.float16)
    whole, last = wkv7_bounded(*x)
    head, between = wkv7_bounded(*(part[:, :23] for part in x))
    tail, final = wkv7_bounded(*(part[:, 23:] for part in x), state_BHKV=between.double())
    for found, expected in ((torch.cat([head, tail], dim=1), whole), (final, last)):
        rounding = 4 * torch.finfo(torch.float16).eps * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding)
