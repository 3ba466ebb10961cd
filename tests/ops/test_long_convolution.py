"""The long convolution, through the FFT and by matrix products, against its definition in float64."""

import functools

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops import long_convolution as package
from basecap.ops._dispatch import interpreted
from basecap.ops.long_convolution import long_convolution, reference, triton_kernels
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate

NAMES = ("y", "du", "dfilter")

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


def on_gpu(test):
    return functools.reduce(lambda decorated, mark: mark(decorated), requires_gpu, test)


def inputs(B: int, T: int, D: int, L: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T + L)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in ((B, T, D), (L, D))]


def packed(B: int, T: int, rate: float = 0.15) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return (torch.rand(B, T, generator=generator) < rate).cumsum(1)


def value_and_gradients(function, tensors: list[Tensor], segments: Tensor | None = None) -> list[Tensor]:
    y = function(*tensors, segments=segments)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)
    return [y, *torch.autograd.grad(y, tensors, seed)]


@pytest.mark.parametrize("T", [1, 2, 7, 16, 33, 70])
@pytest.mark.parametrize("L", [1, 5, 33, 100])
@pytest.mark.parametrize("rate", [None, 0.02, 0.3])
def test_fft_equals_the_definition(T: int, L: int, rate: float | None):
    tensors = inputs(2, T, 3, L)
    segments = None if rate is None else packed(2, T, rate)
    expected = value_and_gradients(reference.long_convolution, tensors, segments)
    found = value_and_gradients(long_convolution, tensors, segments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("segmented", [False, True])
def test_float32_is_as_good_as_the_definition_in_float32(segmented: bool):
    exact = inputs(2, 300, 4, 300)
    single = [x.detach().float().requires_grad_() for x in exact]
    segments = packed(2, 300, 0.02) if segmented else None
    expected = value_and_gradients(reference.long_convolution, exact, segments)
    direct = value_and_gradients(reference.long_convolution, single, segments)
    fft = value_and_gradients(long_convolution, single, segments)
    for a, b, truth in zip(fft, direct, expected, strict=True):
        assert (a - truth).square().mean() <= 4 * (b - truth).square().mean()


def test_one_tap_scales_and_a_late_tap_delays():
    u, _ = inputs(2, 20, 3, 1)
    taps = torch.zeros(20, 3, dtype=torch.float64)
    taps[4] = 2.0
    y = long_convolution(u, taps)
    torch.testing.assert_close(y[:, 4:], 2 * u[:, :-4])
    assert y[:, :4].abs().max() < 1e-14


def test_an_empty_batch_stays_empty():
    assert long_convolution(torch.zeros(0, 5, 3), torch.zeros(5, 3)).shape == (0, 5, 3)


def test_bfloat16_goes_through_float32_also_under_autocast():
    u, taps = (x.detach().bfloat16() for x in inputs(2, 50, 3, 50))
    y = long_convolution(u, taps)
    assert y.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(long_convolution(u, taps), y)
    exact = reference.long_convolution(u.double(), taps.double())
    assert (y.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("shapes", [((2, 0, 3), (4, 3)), ((2, 5, 3), (4, 2)), ((2, 5, 3), (0, 3)), ((5, 3), (5, 3))])
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    with pytest.raises(ConfigError, match="must be"):
        long_convolution(*(torch.zeros(shape) for shape in shapes))


def assert_kernels_accurate(device: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """Compare the kernels with float64, their errors with those of the FFT."""
    u, taps = (x.detach() for x in inputs(*sizes))
    low = [u.to(device, dtype), taps.to(device, torch.float32)]

    def run(backend: str, given: list[Tensor]) -> list[Tensor]:
        return value_and_gradients(
            lambda *x, segments: long_convolution(*x, segments=segments, backend=backend),
            [x.detach().requires_grad_() for x in given],
        )

    # The same rounded numbers on all sides: only the computation is judged.
    truth, plain, fused = run("eager", [x.double() for x in low]), run("eager", low), run("triton", low)
    for name, a, b, exact in zip(NAMES, fused, plain, truth, strict=True):
        assert_as_accurate(name, a, b, exact)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, columns and programs also for short sequences."""
    from basecap.ops.long_convolution.triton_kernels import launch

    for name, value in (("BT", 16), ("BC", {2: 16, 4: 16}), ("BC_TAPS", 16), ("TILE", 16)):
        monkeypatch.setattr(launch, name, value)


SIZES = [(2, 1, 3, 1), (3, 5, 2, 9), (2, 65, 3, 1), (2, 70, 2, 70), (1, 70, 9, 33), (3, 66, 2, 100), (2, 128, 1, 17)]


@in_interpreter
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_in_the_interpreter(sizes: tuple[int, int, int, int], small_tiles: None, poisoned: None):
    assert_kernels_accurate("cpu", torch.float32, sizes)


@in_interpreter
def test_kernels_of_the_size_of_a_gpu_in_the_interpreter():
    assert_kernels_accurate("cpu", torch.float32, (1, 150, 2, 90))


def assert_strides_change_nothing(device: str) -> None:
    """Convolve a slice of a wider tensor, and a tensor with time innermost; pass back a slice and a constant."""
    wide = torch.randn(2, 70, 19, generator=torch.Generator().manual_seed(3)).to(device)
    taps = torch.randn(30, 8, generator=torch.Generator().manual_seed(4)).to(device)

    def run(x: Tensor, dy: Tensor) -> list[Tensor]:
        leaves = [part.detach().requires_grad_() for part in (x, taps)]
        y = long_convolution(*leaves, backend="triton")
        return [y, *torch.autograd.grad(y, leaves, dy)]

    for x in (wide[..., 3:11], wide[..., 3:11].mT.contiguous().mT):
        for dy in (wide[..., 11:], torch.ones_like(wide[:1, :1, :1]).expand(2, 70, 8)):
            for a, b in zip(run(x, dy), run(x.contiguous(), dy.contiguous()), strict=True):
                assert torch.equal(a, b)


@in_interpreter
def test_kernels_read_slices_in_the_interpreter(small_tiles: None):
    assert_strides_change_nothing("cpu")


@in_interpreter
def test_the_custom_operator_is_well_formed(small_tiles: None):
    arguments = [x.detach().float().requires_grad_() for x in inputs(2, 66, 3, 25)]
    result = torch.library.opcheck(torch.ops.basecap.long_convolution.default, arguments)
    assert set(result.values()) == {"SUCCESS"}


def test_what_the_kernels_do_not_take_is_refused():
    u, taps = (x.detach().float() for x in inputs(2, 70, 3, 20))
    with pytest.raises(ConfigError, match="they take no segments"):
        long_convolution(u, taps, segments=packed(2, 70), backend="triton")


def test_kernels_run_by_themselves_where_they_are_faster(monkeypatch: pytest.MonkeyPatch):
    reasons = []

    def choose(op, backend, families, *given, slower):
        reasons.append(families["triton_kernels"].supports(*given) or slower)
        return "eager"

    monkeypatch.setattr(package, "choose", choose)
    monkeypatch.setattr(triton_kernels, "unsupported_by_triton", lambda x, **_: None)
    monkeypatch.setattr(triton_kernels, "LONGEST", 10)
    u = torch.ones(1, 70, 2, dtype=torch.bfloat16)
    long_convolution(u, torch.ones(10, 2))
    long_convolution(u, torch.ones(11, 2))
    long_convolution(u.float(), torch.ones(10, 2))
    long_convolution(u, torch.ones(10, 2), segments=torch.zeros(1, 70, dtype=torch.int64))
    assert reasons == [
        None,
        "for more than 10 taps the FFT is faster",
        "in more than 16 bits the FFT is faster",
        "they take no segments",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes", [*SIZES, (3, 300, 20, 300), (2, 1000, 40, 77), (1, 2048, 64, 2048), (4, 130, 33, 500)]
)
@on_gpu
def test_kernels_on_a_gpu(sizes: tuple[int, int, int, int], dtype: torch.dtype):
    assert_kernels_accurate("cuda", dtype, sizes)


@on_gpu
def test_kernels_read_slices_on_a_gpu():
    assert_strides_change_nothing("cuda")


@on_gpu
def test_kernels_are_deterministic_on_a_gpu():
    u, taps = (x.detach().cuda().requires_grad_() for x in inputs(4, 1000, 64, 500))
    u16 = u.detach().bfloat16().requires_grad_()
    first, second = (value_and_gradients(long_convolution, [u16, taps.detach().float().requires_grad_()]) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
