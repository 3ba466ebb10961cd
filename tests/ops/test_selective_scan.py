"""The selective scan against its definition in float64."""

import functools
import importlib.util

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.ops.selective_scan import eager, operators, reference, selective_scan
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate

NAMES = ("y", "state", "dx", "ddt", "dA", "dB", "dC", "dstate")

requires_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


def on_gpu(test):
    return functools.reduce(lambda decorated, mark: mark(decorated), requires_gpu, test)


def inputs(B: int, T: int, D: int, N: int, strength: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T + D)
    shapes = [(B, T, D), (B, T, D), (D, N), (B, T, N), (B, T, N), (B, D, N)]
    x, dt, A, Bs, Cs, state = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    tensors = [x, dt.abs() * strength, -A.abs(), Bs, Cs, state]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def packed(B: int, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return (torch.rand(B, T, generator=generator) < 0.15).cumsum(1)


def values_and_gradients(function, tensors: list[Tensor], segments: Tensor | None) -> list[Tensor]:
    y, state = function(*tensors[:5], state_BDN=tensors[5], segments=segments)
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (y, state)]
    return [y, state, *torch.autograd.grad([y, state], tensors, seeds)]


@pytest.mark.parametrize("T", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("segmented", [False, True])
def test_eager_equals_the_definition(T: int, segmented: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "CHUNK", 8)
    tensors = inputs(2, T, 5, 3)
    segments = packed(2, T) if segmented else None
    expected = values_and_gradients(reference.selective_scan, tensors, segments)
    found = values_and_gradients(selective_scan, tensors, segments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["eager", pytest.param("numba", marks=requires_numba)])
@pytest.mark.parametrize("strength", [0.0, 0.01, 1.0, 1000.0])
def test_float32_is_as_good_as_the_recurrence_in_float32(strength: float, backend: str):
    exact = inputs(1, 150, 4, 5, strength)
    single = [x.detach().float().requires_grad_() for x in exact]
    expected = values_and_gradients(reference.selective_scan, exact, None)
    recurrent = values_and_gradients(reference.selective_scan, single, None)
    chunked = values_and_gradients(functools.partial(selective_scan, backend=backend), single, None)
    for a, b, truth in zip(chunked, recurrent, expected, strict=True):
        scale = truth.abs().max()
        assert (a - truth).abs().max() <= 2 * (b - truth).abs().max() + 4e-6 * scale


@pytest.mark.parametrize("run", ["eager training", pytest.param("numba_kernels training", marks=requires_numba)])
def test_the_custom_operator_is_well_formed(run: str):
    x, dt, A, Bs, Cs, state = inputs(2, 9, 4, 3, dtype=torch.float32)
    arguments = (x, dt, A, Bs, Cs, state, packed(2, 9), run)
    result = torch.library.opcheck(torch.ops.basecap.selective_scan.default, arguments)
    assert set(result.values()) == {"SUCCESS"}


@in_interpreter
def test_states_are_only_kept_for_a_backward_pass():
    x, dt, A, Bs, Cs, state = inputs(1, 20, 4, 3, dtype=torch.float32)
    kept = operators.scan(x, dt, A, Bs, Cs, state, None, "triton_kernels training")
    dropped = operators.scan(x, dt, A, Bs, Cs, state, None, "triton_kernels")
    assert kept[2].shape == (1, 2, 3, 4) and dropped[2].numel() == 0
    assert all(torch.equal(a, b) for a, b in zip(kept[:2], dropped[:2], strict=True))
    torch.testing.assert_close(kept[2][:, 0], state.mT)


@in_interpreter
def test_the_kernels_have_a_backward_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "backward", lambda *given: pytest.fail("the backward ran in plain PyTorch"))
    tensors = inputs(1, 20, 4, 3, dtype=torch.float32)
    y, _ = selective_scan(*tensors[:5], backend="triton")
    assert all(part.any() for part in torch.autograd.grad(y.sum(), tensors[:5]))


@in_interpreter
def test_gradients_of_one_output_alone_and_twice():
    tensors = inputs(1, 20, 4, 3, dtype=torch.float32)
    y, final = selective_scan(*tensors[:5], state_BDN=tensors[5], backend="triton")
    for output in (y, final):
        first = torch.autograd.grad(output.sum(), tensors, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(output.sum(), tensors, retain_graph=True, allow_unused=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("wrong", ["dt", "A", "B", "empty"])
def test_shapes_that_do_not_fit_are_refused(wrong: str):
    x, dt, A, Bs, Cs, _ = inputs(1, 4, 3, 2)
    if wrong == "dt":
        dt = dt[:, :3]
    elif wrong == "A":
        A = A[:2]
    elif wrong == "B":
        Bs = Bs[..., :1]
    else:
        x, dt, Bs, Cs = x[:, :0], dt[:, :0], Bs[:, :0], Cs[:, :0]
    with pytest.raises(ConfigError):
        selective_scan(x, dt, A, Bs, Cs)


def assert_kernels_accurate(
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    segments: Tensor | None,
    kernels: str = "triton",
) -> None:
    """Compare the kernels with float64, their errors with those of the eager path."""
    tensors = inputs(*sizes, strength=0.2)
    low = [x.detach().to(device, dtype if i in (0, 3, 4) else torch.float32) for i, x in enumerate(tensors)]
    ids = None if segments is None else segments.to(device)

    def run(backend: str, given: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        return values_and_gradients(functools.partial(selective_scan, backend=backend), leaves, ids)

    # The same rounded numbers on all sides: only the computation is judged.
    truth, plain, fused = run("eager", [x.double() for x in low]), run("eager", low), run(kernels, low)
    for name, a, b, exact in zip(NAMES, fused, plain, truth, strict=True):
        assert_as_accurate(name, a, b, exact)


@in_interpreter
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1, 3, 1), (1, 35, 36, 2), (2, 32, 5, 3), (1, 3, 2, 18)])
def test_kernels_in_the_interpreter(sizes: tuple[int, int, int, int], segmented: bool):
    assert_kernels_accurate("cpu", torch.float32, sizes, packed(*sizes[:2]) if segmented else None)


@in_interpreter
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("N", [2, 3])
def test_spans_of_a_long_sequence_in_the_interpreter(N: int, segmented: bool, monkeypatch: pytest.MonkeyPatch):
    from basecap.ops.selective_scan.triton_kernels import launch

    for name, value in (("SPAN", 16), ("SPAN_BACKWARD", 32), ("BS", 2)):
        monkeypatch.setattr(launch, name, value)
    # Segments longer than a span, so that some states pass through.
    assert_kernels_accurate("cpu", torch.float32, (1, 77, 5, N), packed(1, 77) // 6 if segmented else None)


@in_interpreter
def test_only_rows_of_moderate_length_are_walked_whole(monkeypatch: pytest.MonkeyPatch):
    from basecap.ops.selective_scan.triton_kernels import launch

    monkeypatch.setattr(launch, "BUSY", 1)
    x, dt, A, Bs, Cs, _ = (tensor.detach().float() for tensor in inputs(1, launch.WHOLE + 1, 1, 1))
    spans = []
    monkeypatch.setattr(launch, "_walk", lambda given, carried, span, **rest: spans.append(span))
    monkeypatch.setattr(launch.kernels, "carry_fwd_kernel", {(1, 1, 1): lambda *given, **options: None})
    for length in (launch.WHOLE + 1, launch.WHOLE):
        x, dt, Bs, Cs = (tensor[:, :length] for tensor in (x, dt, Bs, Cs))
        launch.forward(x, dt, A, Bs, Cs, None, None, False)
    assert spans == [launch.SPAN, launch.SPAN, launch.WHOLE]


@in_interpreter
@pytest.mark.parametrize("sizes", [(0, 5, 3, 2), (2, 5, 3, 0), (2, 5, 0, 2), (1, 16, 3, 1), (1, 5, 1, 1)])
def test_nothing_and_one_number_in_the_interpreter(sizes: tuple[int, int, int, int]):
    tensors = inputs(*sizes, dtype=torch.float32)
    run = functools.partial(values_and_gradients, tensors=tensors, segments=None)
    found = run(functools.partial(selective_scan, backend="triton"))
    for a, b in zip(found, run(functools.partial(selective_scan, backend="eager")), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("numba", marks=requires_numba), pytest.param("triton", marks=in_interpreter)],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_padding_leaves_states_alone_where_a_decay_is_immediate(backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "CHUNK", 16)
    x, dt, A, Bs, Cs, state = inputs(1, 17, 3, 2, dtype=torch.float32)
    with torch.no_grad():
        A[0, 0] = -torch.inf
    found = values_and_gradients(functools.partial(selective_scan, backend=backend), [x, dt, A, Bs, Cs, state], None)
    torch.testing.assert_close(found[:2], list(reference.selective_scan(x, dt, A, Bs, Cs, state)))
    assert all(torch.isfinite(part).all() for part in found)


@in_interpreter
@pytest.mark.parametrize("segmented", [False, True])
def test_programs_that_take_whole_rows_in_the_interpreter(segmented: bool, monkeypatch: pytest.MonkeyPatch):
    from basecap.ops.selective_scan.triton_kernels import launch

    for name in ("BUSY", "SPAN", "SPAN_BACKWARD"):
        monkeypatch.setattr(launch, name, 1)
    assert_kernels_accurate("cpu", torch.float32, (2, 77, 5, 2), packed(2, 77) // 6 if segmented else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 1, 3, 1),
        (2, 147, 96, 16),
        (1, 1000, 40, 5),
        (2, 2048, 256, 16),
        (1, 5000, 40, 4),
        (1, 64, 64, 64),
        (24, 100, 1536, 4),
    ],
)
@on_gpu
def test_kernels_on_a_gpu(sizes: tuple[int, int, int, int], segmented: bool, dtype: torch.dtype):
    assert_kernels_accurate("cuda", dtype, sizes, packed(*sizes[:2]) if segmented else None)


@on_gpu
def test_kernels_are_deterministic_on_a_gpu():
    tensors = [x.detach().to("cuda", torch.float32).requires_grad_() for x in inputs(2, 300, 96, 16)]
    first, second = (values_and_gradients(selective_scan, tensors, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
