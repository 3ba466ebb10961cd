"""The convolution through the FFT against its definition in float64."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.long_convolution import long_convolution, reference


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
