"""The kernels of the long convolution as PyTorch custom operators, one node each when compiled, saving the inputs."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import operator


@operator("basecap::long_convolution")
def convolve(u: Tensor, filter: Tensor) -> Tensor:
    """Return [B, T, D]."""
    return launch_of(__package__).forward(u, filter)


@operator("basecap::long_convolution_backward")
def convolve_backward(dy: Tensor, u: Tensor, filter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of u and of the filter, that in float32."""
    return launch_of(__package__).backward(dy, u, filter)


@convolve.register_fake
def _(u, filter):
    return u.new_empty(u.shape)


@convolve_backward.register_fake
def _(dy, u, filter):
    return u.new_empty(u.shape), filter.new_empty(filter.shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    u, filter = ctx.saved_tensors
    du, dfilter = convolve_backward(dy, u, filter)
    return du, dfilter.to(filter.dtype)


convolve.register_autograd(_gradients, setup_context=_save)
convolve_backward.register_autograd(no_second_derivatives("long_convolution"))
