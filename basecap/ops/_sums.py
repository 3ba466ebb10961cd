"""Running sums, which PyTorch adds on a GPU in the order in which parts of them are ready."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import deterministic
from basecap.ops.operators import operator

#: Types of devices whose widest numbers are float32: Apple's GPUs.
WITHOUT_FLOAT64 = frozenset({"mps"})


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of numbers whose small differences count: float64, or float32 on a device without it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def exact_device(device: torch.device) -> torch.device:
    """Return where float64 is computed for this device: there, or on the CPU."""
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def running_sums(x: Tensor, dim: int) -> Tensor:
    """Return the sums up to each index along a dimension, of the shape and dtype of x, as `torch.cumsum` does.

    That has no deterministic form on a GPU. There, after `torch.use_deterministic_algorithms(True)`, the sums are
    added in pairs, which rounds fewer times.
    """
    if x.is_cuda and x.is_floating_point() and deterministic():
        return sums_in_pairs(x, dim)
    return uncompiled_sums(x, dim) if torch.compiler.is_compiling() else x.cumsum(dim)


# Inductor of PyTorch 2.11 fails where it fuses few long scans on a GPU with what reads one number for each of them,
# such as a bias.
@operator("basecap::running_sums")
def uncompiled_sums(x: Tensor, dim: int) -> Tensor:
    """Return the running sums, by PyTorch's own scan: fast along the last dimension only."""
    return x.movedim(dim, -1).contiguous().cumsum(-1).movedim(-1, dim).contiguous()


@uncompiled_sums.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sum_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return uncompiled_sums(grad.flip(ctx.dim), ctx.dim).flip(ctx.dim), None


uncompiled_sums.register_autograd(_sum_back, setup_context=lambda ctx, inputs, output: setattr(ctx, "dim", inputs[1]))


def sums_in_pairs(x: Tensor, dim: int) -> Tensor:
    """Return what `running_sums` does, in log2(T) steps that each add the sums of spans of twice the length.

    An index is rounded log2(T) times, not T times; the gradient is added likewise.
    """
    span, size = 1, x.shape[dim]
    while span < size:
        first, rest = x.split([span, size - span], dim)
        x = torch.cat([first, rest + x.narrow(dim, 0, size - span)], dim)
        span *= 2
    return x
