"""The kernels of the short convolution as PyTorch custom operators, one node each when compiled, saving the inputs."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import operator


# The kernels take any strides; without the tag a compiled graph copies slices whose strides it has padded.
@operator("basecap::short_convolution", tags=[torch.Tag.flexible_layout])
def convolve(x: Tensor, taps: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool) -> Tensor:
    """Return [B, T, D]; taps [W, D] and bias [D] in float32."""
    return launch_of(__package__).forward(x, taps, bias, segments, silu)


@operator("basecap::short_convolution_backward", tags=[torch.Tag.flexible_layout])
def convolve_backward(
    dy: Tensor, x: Tensor, taps: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, [W + 1, D], of the taps and the bias."""
    return launch_of(__package__).backward(dy, x, taps, bias, segments, silu)


@convolve.register_fake
def _(x, taps, bias, segments, silu):
    return x.new_empty(x.shape)


@convolve_backward.register_fake
def _(dy, x, taps, bias, segments, silu):
    return x.new_empty(x.shape), taps.new_empty(taps.shape[0] + 1, taps.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, taps, bias, segments = ctx.saved_tensors
    dx, sums = convolve_backward(dy, x, taps, bias, segments, ctx.silu)
    return dx, sums[:-1], None if bias is None else sums[-1], None, None


convolve.register_autograd(_gradients, setup_context=_save)
convolve_backward.register_autograd(no_second_derivatives("short_convolution"))
