"""The kernels of the short convolution as PyTorch operators: one node each in a compiled graph, saving the inputs."""

from typing import Any

import torch
from torch import Tensor


def _kernels() -> Any:
    # Triton is only needed, and only installed, where its kernels can run.
    from basecap.ops.short_convolution import launch

    return launch


# The kernels take any strides; without the tag a compiled graph copies slices whose strides it has padded.
@torch.library.custom_op("basecap::short_convolution", mutates_args=(), tags=[torch.Tag.flexible_layout])
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool) -> Tensor:
    """Return [B, T, D]."""
    return _kernels().forward(x, weight, bias, segments, silu)


@torch.library.custom_op("basecap::short_convolution_backward", mutates_args=(), tags=[torch.Tag.flexible_layout])
def convolve_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight [D, W] and bias [D]."""
    return _kernels().backward(dy, x, weight, bias, segments, silu)


@convolve.register_fake
def _(x, weight, bias, segments, silu):
    return x.new_empty(x.shape)


@convolve_backward.register_fake
def _(dy, x, weight, bias, segments, silu):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[:1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, segments = ctx.saved_tensors
    dx, dweight, dbias = convolve_backward(dy, x, weight, bias, segments, ctx.silu)
    return dx, dweight, None if bias is None else dbias.to(bias.dtype), None, None


convolve.register_autograd(_gradients, setup_context=_save)
