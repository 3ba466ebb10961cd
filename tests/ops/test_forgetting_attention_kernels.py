"""The Triton kernels of attention with forget gates: through the interpreter in float32, on a GPU in every dtype."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.ops.forgetting_attention import eager, forgetting_attention, reference
from basecap.ops.forgetting_attention.triton_kernels import operators
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate, relative_error
from tests.ops._recurrences import draw, packed

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])

NAMES = ("o", "dq", "dk", "dv", "dlog_decay")
#: How strongly the gates close; "cut": here and there completely, so that the sums are large where decays are small.
DECAYS = {"open": 0.01, "closing": 3.0, "cut": 0.1}


def inputs(
    sizes: tuple[int, ...], device: str, decays: str, dtype: torch.dtype = torch.float32, size: float = 1.0
) -> list[Tensor]:
    """q, k, v and log decays of B, T, H, K, V = `sizes`; `size`: of q and k."""
    B, T, H, K, V = sizes
    log_decay = -DECAYS[decays] * draw(3, B, T, H).abs()
    if decays == "cut":
        log_decay[:, 5::17] = -3e4
    q, k, v = size * draw(0, B, T, H, K), size * draw(1, B, T, H, K), draw(2, B, T, H, V)
    return [*(x.to(device, dtype) for x in (q, k, v)), log_decay.to(device, torch.float32)]


def results(function, tensors: list[Tensor], segments: Tensor | None) -> list[Tensor]:
    """Outputs and gradients of a weighting of them that is rounded to the dtype of the outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    o = function(*leaves, segments)
    return [o.detach(), *torch.autograd.grad(o, leaves, draw(9, *o.shape).to(o))]


def defined(q, k, v, log_decay, segments):
    return reference.attention(q, k, v, log_decay, q.shape[3] ** -0.5, segments)


def plain(q, k, v, log_decay, segments):
    return forgetting_attention(q, k, v, log_decay, segments=segments, backend="eager")


def kernels(q, k, v, log_decay, segments):
    return forgetting_attention(q, k, v, log_decay, segments=segments, backend="triton")


def assert_kernels(x: list[Tensor], segments: Tensor | None) -> None:
    truth = results(defined, [part.double() for part in x], segments)
    for name, *parts in zip(NAMES, results(kernels, x, segments), results(plain, x, segments), truth, strict=True):
        assert_as_accurate(name, *parts)


def attend(x: list[Tensor], segments: Tensor | None, *, skip: bool = True) -> tuple[Tensor, ...]:
    q, k, v, log_decay = x
    return operators.attend(q, k, v, eager.totals(log_decay), segments, q.shape[3] ** -0.5, skip)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize(
    ("sizes", "decays", "cuts"),
    [
        ((2, 1, 2, 5, 3), "open", None),
        ((2, 33, 1, 16, 20), "cut", None),
        ((1, 70, 2, 33, 16), "open", [1, 20, 52, 69]),
        ((2, 70, 1, 16, 8), "closing", [31]),
    ],
)
def test_kernels_are_as_accurate_as_eager(device: str, sizes: tuple[int, ...], decays: str, cuts: list[int] | None):
    segments = None if cuts is None else packed(sizes[0], cuts, sizes[1]).to(device)
    assert_kernels(inputs(sizes, device, decays), segments)


@pytest.mark.usefixtures("poisoned")
@in_interpreter
def test_what_half_precision_runs(monkeypatch: pytest.MonkeyPatch):
    """Tiles of more queries than keys, decays by way of a token between, sums in float32: with such inputs too."""
    monkeypatch.setattr(operators, "in_half", lambda x: True)
    monkeypatch.setitem(operators.TILES, 4, {128: (32, 16)})
    x, segments = inputs((2, 90, 1, 16, 20), "cpu", "cut"), packed(2, [41, 60], 90)
    truth = results(defined, [part.double() for part in x], segments)
    *found, dlog_decay = results(kernels, x, segments)
    for name, *parts in zip(NAMES, found, results(plain, x, segments), truth, strict=False):
        assert_as_accurate(name, *parts)
    # The kernels' weights differ in the last bits, and most of what gates sum cancels; rounding to 16 bits costs more.
    assert relative_error(dlog_decay, truth[4]) < 2**-16


def pairs(ranges: Tensor, queries: int) -> tuple[set, set]:
    """Return the pairs of tiles that both directions read: of queries, and of earlier keys."""
    ranges = ranges.tolist()
    keys, share = len(ranges) - queries, (len(ranges) - queries) // queries
    first = {(i, j) for i in range(queries) for j in range(ranges[i], (i + 1) * share)}
    return first, {(i, j) for j in range(keys) for i in range(j // share, ranges[queries + j])}


@anywhere
@pytest.mark.parametrize(("decays", "size", "skips"), [("closing", 1.0, True), ("closing", 12.0, False)])
def test_skipping_changes_no_bit(decays: str, size: float, skips: bool, device: str, monkeypatch: pytest.MonkeyPatch):
    """Nothing is skipped either where scores could outweigh decays that would close smaller ones."""
    if device == "cpu":
        monkeypatch.setitem(operators.TILES, 4, {128: (32, 16)})
    queries, keys = operators.TILES[4][128]
    x = inputs((1, 4 * queries, 2, 16, 8), device, decays, size=size)
    both = {skip: attend(x, None, skip=skip) for skip in (True, False)}
    ranges = {skip: [pairs(row, 4) for row in kept[3].flatten(0, 1)] for skip, kept in both.items()}
    whole = {(i, j) for i in range(4) for j in range((i + 1) * queries // keys)}
    assert all(first == second == whole for first, second in ranges[False])
    assert all(first == second and (first < whole) == skips for first, second in ranges[True])
    do, scale = draw(9, *x[2].shape).to(x[2]), 0.25
    grads = [operators.attend_backward(do, x[:3], list(kept[1:]), None, scale) for kept in both.values()]
    for skipping, reading in zip([both[True][0], *grads[0]], [both[False][0], *grads[1]], strict=True):
        assert torch.equal(skipping, reading)


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("channels", [16, 128])
def test_both_backward_kernels_have_the_same_weights(channels: int, device: str):
    """In float32 sums over keys and sums over queries are of the same numbers: their totals differ by float64 alone.

    Not so in the interpreter: there a library rounds q k^T and k q^T differently on some processors.
    """
    x = inputs((2, 70, 2, channels, channels), device, "open")
    do = draw(9, *x[2].shape).to(x[2])
    difference = operators.attend_backward(do, x[:3], list(attend(x, None)[1:]), None, channels**-0.5)[3]
    assert (difference.sum(-1).abs() < 2**-44 * difference.abs().sum(-1)).all()


@anywhere
def test_rows_and_heads_alone_and_other_layouts_give_the_same_bits(device: str):
    x, segments = inputs((2, 40, 2, 16, 16), device, "closing"), packed(2, [33], 40).to(device)
    whole = attend(x, segments)[0]
    assert torch.equal(attend([part[1:, :, 1:] for part in x], segments[1:])[0], whole[1:, :, 1:])
    turned = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in x]
    assert torch.equal(attend(turned, segments > 0)[0], whole)


@anywhere
def test_operators(device: str):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    q, k, v, log_decay = inputs((1, 20, 2, 4, 8), device, "open")
    leaves = [x.requires_grad_() for x in (q, k, v, eager.totals(log_decay))]
    for segments in (None, packed(1, [7], 20).to(device)):
        given = (*leaves, segments, 0.5, True)
        found = torch.library.opcheck(operators.attend.overload, given, test_utils=checks)
        assert set(found.values()) == {"SUCCESS"}
    kept = list(operators.attend(*(x.detach() for x in leaves), None, 0.5, True)[1:])
    given = (torch.ones_like(v), [x.detach() for x in leaves[:3]], kept, None, 0.5)
    found = torch.library.opcheck(
        operators.attend_backward.overload, given, test_utils=("test_schema", "test_faketensor")
    )
    assert set(found.values()) == {"SUCCESS"}


@in_interpreter
def test_wide_heads_are_refused():
    for sizes, what in (((1, 3, 1, 129, 4), "at most 128 channels, not 129"), ((1, 3, 1, 4, 200), "1 to 128 channels")):
        with pytest.raises(ConfigError, match=what):
            kernels(*inputs(sizes, "cpu", "open"), None)


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [((2, 1000, 2, 64, 64), None), ((1, 700, 2, 128, 96), [1, 63, 64, 300]), ((2, 300, 1, 32, 32), [90])],
)
def test_kernels_at_size(device: str, sizes: tuple[int, ...], cuts: list[int] | None, decays: str, dtype: torch.dtype):
    """The weighting of the outputs is rounded beside the definition, as it is for plain PyTorch."""
    segments = None if cuts is None else packed(sizes[0], cuts, sizes[1]).to(device)
    x = inputs(sizes, device, decays, dtype)
    assert_kernels(x, segments)
    first, second = (results(kernels, x, segments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
