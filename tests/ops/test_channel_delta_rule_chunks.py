"""The chunked Triton kernels of the delta rule by channel: in the interpreter in float32, on a GPU in every dtype."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops import channel_delta_rule as package
from basecap.ops._dispatch import interpreted
from basecap.ops._recurrence.blocks import starts
from basecap.ops.channel_delta_rule import decoupled_delta_rule, eager, reference, triton_chunks, triton_tokens
from basecap.ops.channel_delta_rule.triton_chunks import operators
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._recurrences import draw, packed, results

NAMES = ("o", "state", "dq", "dk", "dv", "derased", "dlog_decay", "dstate")
#: Mean log decays, and how they spread.
DECAYS = {
    "none": (0.0, 0.0),
    "weak": (1e-3, 0.5),
    "middling": (1.0, 0.5),
    "strong": (60.0, 0.5),
    "mixed": (0.3, 3.0),
    "breaks": (1e-3, 0.5),
}

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])


def inputs(sizes: tuple[int, ...], decays: str, device: str, dtype: torch.dtype, alike: float = 0.0) -> list[Tensor]:
    """q, k, v and erased in `dtype`, log decays in float32; `alike`: how much of all keys is one vector."""
    B, T, H, K, V = sizes
    mean, spread = DECAYS[decays]
    log_decay = -mean * torch.exp(spread * draw(3, B, T, H, K))
    if decays == "breaks":
        log_decay[:, 20::37] = -1e5
    q, k = F.normalize(draw(0, B, T, H, K), dim=-1), F.normalize(draw(1, B, T, H, K) + alike * draw(6, K), dim=-1)
    low = [x.to(device, dtype) for x in (q, k, draw(2, B, T, H, V), k * (draw(4, B, T, H, K) + alike).sigmoid())]
    return [*low, log_decay.to(device, torch.float32)]


def first_state(sizes: tuple[int, ...], device: str) -> Tensor:
    B, _, H, K, V = sizes
    return draw(5, B, H, K, V).to(device, torch.float32)


def chunked(*args: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the operator by the definition's positions."""
    *given, segments = args
    o, final, _ = operators.scan(*given, starts(segments))
    return o, final


def assert_kernels(x: list[Tensor], first: Tensor | None = None, segments: Tensor | None = None) -> None:
    """Compare outputs, state and gradients with the definition in float64, their errors with the eager path's."""
    wide = None if first is None else first.double()
    truth = results(reference.channel_delta_rule, [part.double() for part in x], wide, segments)
    plain = results(eager.channel_delta_rule, x, first, segments)
    found = results(chunked, x, first, segments)
    dtype = x[2].dtype
    for name, actual, expected, exact in zip(NAMES, found, plain, truth, strict=len(truth) == len(NAMES)):
        assert actual.dtype == expected.dtype
        # The kernels multiply in the dtype of v: no result, whatever its dtype, is better than that.
        assert_as_accurate(name, actual.to(dtype), expected.to(dtype), exact)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize(
    ("sizes", "started"),
    [
        ((2, 1, 1, 3, 2), False),
        ((2, 37, 2, 8, 20), True),
        ((1, 70, 1, 72, 66), True),
        ((1, 64, 2, 32, 16), False),
    ],
)
def test_kernels_are_as_accurate_as_eager(device: str, sizes: tuple[int, ...], started: bool):
    first = first_state(sizes, device) if started else None
    assert_kernels(inputs(sizes, "middling", device, torch.float32), first)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize("decays", DECAYS)
def test_any_decay(device: str, decays: str):
    sizes = (1, 70, 1, 32, 16)
    assert_kernels(inputs(sizes, decays, device, torch.float32), first_state(sizes, device))


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize("cuts", [[1, 15, 16, 17, 40, 69], range(1, 70, 2)])
def test_packed_rows(device: str, cuts: list[int]):
    sizes = (2, 70, 1, 16, 20)
    tensors = inputs(sizes, "weak", device, torch.float32)
    assert_kernels(tensors, first_state(sizes, device), packed(2, cuts, 70).to(device))


ON_GPU = [pytest.param("cuda", dtype, marks=requires_gpu) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


@pytest.mark.usefixtures("chained")
@pytest.mark.parametrize(("device", "dtype"), [pytest.param("cpu", torch.float32, marks=in_interpreter), *ON_GPU])
def test_keys_that_are_almost_the_same(device: str, dtype: torch.dtype):
    """Keys close to each other, strengths close to 1 and no decay: the hardest systems to invert.

    Nothing fades from the state, so that rounding errors of each chunk stay in it.
    """
    sizes = (1, 100, 1, 64, 16)
    assert_kernels(inputs(sizes, "none", device, dtype, alike=3.0), first_state(sizes, device))


@pytest.mark.usefixtures("poisoned")
@in_interpreter
@pytest.mark.parametrize("decays", ["mixed", "breaks"])
def test_chunks_of_half_precision(decays: str):
    """The interpreter computes float16 correctly, and bfloat16 not."""
    sizes = (1, 150, 1, 64, 16)
    assert_kernels(inputs(sizes, decays, "cpu", torch.float16), first_state(sizes, "cpu"), packed(1, [64, 100], 150))


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 500, 3, 64, 64), (1, 200, 2, 128, 128), (2, 300, 2, 40, 128), (2, 77, 1, 20, 9)])
@pytest.mark.parametrize("decays", DECAYS)
def test_every_dtype(device: str, dtype: torch.dtype, sizes: tuple[int, ...], decays: str):
    tensors, first = inputs(sizes, decays, device, dtype), first_state(sizes, device)
    assert_kernels(tensors, first)
    assert_kernels(tensors, first, packed(sizes[0], range(5, sizes[1], 60), sizes[1]).to(device))


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
def test_many_programs_agree_with_few(device: str, dtype: torch.dtype, width: int):
    """A full GPU, where programs of all kinds run side by side, computes what each row computes alone, bit by bit."""
    x = inputs((16, 1024, 6, width, width), "mixed", device, dtype)
    whole = results(chunked, x, None, None)
    again = results(chunked, x, None, None)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    leaves = [part[:1].detach().requires_grad_() for part in x]
    o, final = chunked(*leaves, None, None)
    weights = draw(90, 16, 1024, 6, width)[:1].to(device), draw(91, 16, 6, width, width)[:1].to(device)
    loss = (o.double() * weights[0]).sum() + (final.double() * weights[1]).sum()
    alone = [o, final, *torch.autograd.grad(loss, leaves)]
    for together, found in zip(whole, alone, strict=True):
        assert torch.equal(together[:1], found)


@anywhere
def test_a_decay_that_leaves_nothing_has_no_gradient(device: str):
    tensors = inputs((1, 50, 1, 8, 8), "weak", device, torch.float32)
    tensors[4][:, [3, 40]] = -torch.inf
    dlog_decay = results(chunked, tensors, None, None)[6]
    assert torch.isfinite(dlog_decay).all()
    assert not dlog_decay[:, [3, 40]].any()
    assert dlog_decay[:, 1:3].all()


@anywhere
def test_nothing_else_leaks_into_the_results(device: str):
    """Other rows, heads, segments and later tokens change nothing, bit by bit."""
    tensors = inputs((2, 70, 2, 16, 16), "weak", device, torch.float32)
    first, segments = first_state((2, 70, 2, 16, 16), device), packed(2, [33], 70).to(device)
    o, _ = chunked(*tensors, first, segments)
    others = [x * 10 for x in tensors]
    for x, y in zip(others, tensors, strict=True):
        x[1:, 33:60, 1:] = y[1:, 33:60, 1:]
    changed, _ = chunked(*others, 10 * first, segments)
    assert torch.equal(o[1, 33:60, 1], changed[1, 33:60, 1])
    assert not torch.isclose(o, changed)[:, :33].all()


@anywhere
def test_no_gradient_crosses_segments(device: str):
    x = [part.requires_grad_() for part in inputs((1, 40, 1, 8, 8), "weak", device, torch.float32)]
    first = first_state((1, 40, 1, 8, 8), device).requires_grad_()
    o, _ = chunked(*x, first, packed(1, [21], 40).to(device))
    *grads, dfirst = torch.autograd.grad(o[:, 21:].sum(), [*x, first])
    assert all((grad[:, :21] == 0).all() for grad in grads)
    assert (dfirst == 0).all()


@anywhere
@pytest.mark.parametrize("which", [0, 1])
def test_the_outputs_alone_and_the_state_alone_have_gradients(device: str, which: int):
    sizes = (1, 40, 1, 8, 8)
    leaves = [*inputs(sizes, "middling", device, torch.float32), first_state(sizes, device)]
    leaves = [x.requires_grad_() for x in leaves]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found = torch.autograd.grad(chunked(*leaves, None)[which].sum(), leaves)
    exact = reference.channel_delta_rule(*wide)[which].sum()
    for x, y in zip(found, torch.autograd.grad(exact, wide, materialize_grads=True), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@anywhere
@pytest.mark.parametrize("segmented", [False, True])
def test_the_operator_keeps_its_promises(device: str, segmented: bool):
    sizes = (1, 20, 1, 8, 4)
    tensors = [*inputs(sizes, "weak", device, torch.float32), first_state(sizes, device)]
    new = starts(packed(1, [7], 20).to(device)) if segmented else None
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = (*(x.requires_grad_() for x in tensors), new)
    found = torch.library.opcheck(operators.scan.overload, given, test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


def decoupled(*args):
    """Run the public op by the definition's positions."""
    q, k, v, erase, log_decay, state, segments = args
    return decoupled_delta_rule(q, k, v, erase, log_decay, state_BHKV=state, segments=segments, backend="triton")


def defined(*args):
    q, k, v, erase, log_decay, state, segments = args
    return reference.channel_delta_rule(q, k, v, erase * k, log_decay, state, segments)


@anywhere
@pytest.mark.parametrize("family", ["triton_chunks", "triton_tokens"])
def test_the_public_function_runs_the_kernels(device: str, family: str, monkeypatch: pytest.MonkeyPatch):
    """Every argument where it belongs, whatever its dtype."""
    monkeypatch.setattr(package, "choose", lambda op, backend, families, x, *_: family)
    q, k, v, _, log_decay = inputs((2, 40, 1, 8, 6), "middling", device, torch.float32)
    x = [q, k, v, draw(7, *k.shape).sigmoid().to(k), log_decay.double()]
    first, segments = first_state((2, 40, 1, 8, 6), device), packed(2, [11, 30], 40).to(device)
    truth = results(defined, [part.double() for part in x], first.double(), segments)
    for found, exact in zip(results(decoupled, x, first.double(), segments), truth, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@in_interpreter
def test_short_rows_and_wide_heads_take_the_recurrence(monkeypatch: pytest.MonkeyPatch):
    for family in (triton_chunks, triton_tokens):
        monkeypatch.setattr(family, "channel_delta_rule", lambda *x, name=family.__name__: called.append(name) or x[:2])
    called: list[str] = []
    for T, K, V in ((17, 8, 128), (16, 8, 8), (40, 129, 8), (40, 8, 129), (33, 128, 8)):
        q, k, v, erased, log_decay = inputs((1, T, 1, K, V), "weak", "cpu", torch.float32)
        decoupled_delta_rule(q, k, v, erased, log_decay, backend="triton")
    assert [name.rpartition("_")[2] for name in called] == ["chunks", "tokens", "tokens", "tokens", "chunks"]
