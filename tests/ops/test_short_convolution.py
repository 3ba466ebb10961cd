"""The short convolution against its definition in float64."""

import functools

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.ops.short_convolution import reference, short_convolution
from basecap.ops.short_convolution.triton_kernels import WIDEST, operators
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate

NAMES = ("y", "dx", "dweight", "dbias")

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


def on_gpu(test):
    return functools.reduce(lambda decorated, mark: mark(decorated), requires_gpu, test)


def inputs(B: int, T: int, D: int, W: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T + D)
    shapes = [(B, T, D), (D, W), *([(D,)] if bias else [])]
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def packed(B: int, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return (torch.rand(B, T, generator=generator) < 0.3).cumsum(1)


def values_and_gradients(function, tensors: list[Tensor]) -> list[Tensor]:
    y = function(*tensors)
    generator = torch.Generator().manual_seed(7)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    return [y, *torch.autograd.grad(y, tensors, dy)]


@pytest.mark.parametrize("sizes", [(2, 1, 3, 4), (2, 3, 3, 8), (2, 9, 5, 1), (1, 13, 3, 4), (1, 20, 2, 12)])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_eager_equals_the_definition(sizes: tuple[int, int, int, int], activation: str, segmented: bool, bias: bool):
    tensors = inputs(*sizes, bias)
    options = {"activation": activation, "segments": packed(*sizes[:2]) if segmented else None}
    expected = values_and_gradients(functools.partial(reference.short_convolution, **options), tensors)
    found = values_and_gradients(functools.partial(short_convolution, **options), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_eager_has_second_derivatives():
    tensors = inputs(2, 5, 3, 4)
    convolve = functools.partial(short_convolution, activation="silu", segments=packed(2, 5))
    assert torch.autograd.gradgradcheck(convolve, tensors)


def test_nothing_reaches_across_segments_or_back_in_time():
    x, weight, bias = inputs(1, 9, 3, 4)
    segments = torch.tensor([[0, 0, 0, 0, 5, 5, 5, 5, 5]])
    y = short_convolution(x, weight, bias, activation="silu", segments=segments)
    alone = short_convolution(x[:, 4:7], weight, bias, activation="silu")
    torch.testing.assert_close(y[:, 4:7], alone)


def test_half_precision_is_summed_in_float32():
    x, weight, bias = inputs(2, 9, 4, 4, dtype=torch.bfloat16)
    y = short_convolution(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, short_convolution(x.float(), weight.float(), bias.float()).bfloat16())


def test_autocast_changes_nothing():
    tensors = inputs(2, 9, 4, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = short_convolution(*tensors)
    assert torch.equal(y, short_convolution(*tensors))


def test_an_empty_batch():
    x, weight, bias = inputs(0, 5, 3, 4)
    assert short_convolution(x, weight, bias).shape == (0, 5, 3)


@pytest.mark.parametrize("wrong", ["weight", "width", "bias", "segments", "activation", "wide"])
def test_what_does_not_fit_is_refused(wrong: str):
    x, weight, bias = inputs(2, 5, 3, WIDEST + 1 if wrong == "wide" else 4)
    segments = torch.zeros(2, 4 if wrong == "segments" else 5, dtype=torch.int64)
    weight = {"weight": weight[:2], "width": weight[:, :0]}.get(wrong, weight)
    bias = bias[:2] if wrong == "bias" else bias
    activation = "silo" if wrong == "activation" else "silu"
    with pytest.raises(ConfigError):
        short_convolution(
            x, weight, bias, activation=activation, segments=segments, backend="triton" if wrong == "wide" else "eager"
        )


def assert_kernels_accurate(
    device: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], segmented: bool, silu: bool, bias: bool
) -> None:
    """Compare the kernels with float64, their errors with those of the eager path."""
    segments = packed(*sizes[:2]).to(device) if segmented else None
    options = {"activation": "silu" if silu else "none", "segments": segments}

    def run(backend: str, given: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        return values_and_gradients(functools.partial(short_convolution, backend=backend, **options), leaves)

    # The same rounded numbers on all sides: only the computation is judged.
    low = [x.detach().to(device, dtype if i == 0 else torch.float32) for i, x in enumerate(inputs(*sizes, bias))]
    truth, plain, fused = run("eager", [t.double() for t in low]), run("eager", low), run("triton", low)
    for name, a, b, exact in zip(NAMES[: len(truth)], fused, plain, truth, strict=True):
        assert_as_accurate(name, a, b, exact)


@in_interpreter
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1, 3, 4), (1, 3, 130, 8), (2, 19, 5, 1), (1, 35, 4, 3)])
def test_kernels_in_the_interpreter(
    sizes: tuple[int, int, int, int],
    segmented: bool,
    silu: bool,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
    poisoned: None,
):
    from basecap.ops.short_convolution.triton_kernels import launch

    # Several programs along the tokens.
    monkeypatch.setattr(launch, "PROGRAMS", 3)
    monkeypatch.setattr(launch, "PROGRAMS_BACKWARD", 3)
    assert_kernels_accurate("cpu", torch.float32, sizes, segmented, silu, bias)


def assert_strides_change_nothing(device: str) -> None:
    """Convolve slices of a wider tensor, and a tensor with time innermost; pass back a slice and a constant."""
    wide = torch.randn(2, 11, 19, generator=torch.Generator().manual_seed(3)).to(device)
    _, weight, bias = (tensor.to(device) for tensor in inputs(2, 11, 8, 4, dtype=torch.float32))
    triton = functools.partial(short_convolution, activation="silu", backend="triton")

    def run(x: Tensor, dy: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = triton(leaf, weight, bias)
        return [y, *torch.autograd.grad(y, [leaf, weight, bias], dy)]

    for x in (wide[..., 3:11], wide[..., 3:11].mT.contiguous().mT):
        for dy in (wide[..., 11:], torch.ones_like(wide[:1, :1, :1]).expand(2, 11, 8)):
            for a, b in zip(run(x, dy), run(x.contiguous(), dy.contiguous()), strict=True):
                assert torch.equal(a, b)


@in_interpreter
def test_kernels_read_slices_in_the_interpreter():
    assert_strides_change_nothing("cpu")


@in_interpreter
@pytest.mark.parametrize("bias", [False, True])
def test_the_custom_operator_is_well_formed(bias: bool):
    x, weight, shift = inputs(2, 9, 4, 3, dtype=torch.float32)
    taps = weight.detach().T.contiguous().requires_grad_()
    arguments = (x, taps, shift if bias else None, packed(2, 9), True)
    result = torch.library.opcheck(torch.ops.basecap.short_convolution.default, arguments)
    assert set(result.values()) == {"SUCCESS"}
    assert operators.convolve(*arguments).shape == (2, 9, 4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2, 1, 3, 4), (3, 2, 20, 8), (2, 147, 96, 3), (1, 1000, 40, 5), (2, 2048, 1792, 4), (4, 3000, 129, 2)]
)
@on_gpu
def test_kernels_on_a_gpu(
    sizes: tuple[int, int, int, int], segmented: bool, dtype: torch.dtype, silu: bool, bias: bool
):
    assert_kernels_accurate("cuda", dtype, sizes, segmented, silu, bias)


@on_gpu
def test_kernels_read_slices_on_a_gpu():
    assert_strides_change_nothing("cuda")


@on_gpu
def test_kernels_reach_beyond_32_bit_offsets_on_a_gpu():
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(3, 400_000, 2048, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(2048, 4, generator=generator, device="cuda").requires_grad_()
    y = short_convolution(x, weight, backend="triton")
    dx, dweight = torch.autograd.grad(y, [x, weight], y.detach())
    plain, exact = (
        short_convolution(x[-1:, -64:].detach().to(dtype), weight.detach().to(dtype), backend="eager")
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert_as_accurate("y", y[-1, -60:], plain[0, -60:], exact[0, -60:])
    assert dx[-1, -1].equal((y[-1, -1].float() * weight[:, -1]).to(dx.dtype))
    assert torch.isfinite(dweight).all()


@on_gpu
def test_kernels_are_deterministic_on_a_gpu():
    tensors = [x.detach().to("cuda").requires_grad_() for x in inputs(4, 3000, 192, 4, dtype=torch.float32)]
    first, second = (values_and_gradients(short_convolution, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
