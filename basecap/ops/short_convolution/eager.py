"""The short convolution in plain PyTorch: one multiplication and addition of the whole tensor per tap, in place.

On a CPU this takes half as long as PyTorch's own depthwise convolution, which wants time innermost; a backward pass
of its own saves the zeros that autograd would pad each tap's gradient with, and every product but its sum.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._transforms import refuse_all_transforms, refuse_batched_gradients

RUNS, BACKEND = EAGER, "eager"

#: Into how many spans of time the sums over tokens are cut.
SPANS = 16


def supports(x_BTD: Tensor, width: int) -> None:
    """Return None: this runs everywhere."""


def short_convolution(
    x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, segments: Tensor | None, silu: bool
) -> Tensor:
    """Return [B, T, D] in the dtype of x; see `basecap.ops.short_convolution.short_convolution`."""
    refuse_all_transforms("short_convolution", x_BTD, weight_DW, bias_D)
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    # Taps of one lag side by side: read with a stride they would take as long as the tensor they multiply.
    taps_WD = weight_DW.to(wide).T.contiguous()
    out = _Taps.apply(x_BTD.to(wide), taps_WD, None if bias_D is None else bias_D.to(wide), segments)
    return (F.silu(out) if silu else out).to(x_BTD.dtype)


def _seen(x_BTD: Tensor, segments: Tensor | None, lag: int) -> Tensor:
    """Return x [B, T - lag, D], zero where the position minus or plus `lag` is in another segment."""
    if segments is None:
        return x_BTD
    return x_BTD.where((segments[:, lag:] == segments[:, : segments.shape[1] - lag])[..., None], 0)


def _summed_product(a_BTD: Tensor, b_BTD: Tensor) -> Tensor:
    """Return the sum of a b over batch and time [D]; only a span of it is in memory."""
    B, T, D = a_BTD.shape
    span = max(8, -(-T // SPANS))
    total = a_BTD.new_zeros(B, span, D)
    for a, b in zip(a_BTD.split(span, dim=1), b_BTD.split(span, dim=1), strict=True):
        total[:, : a.shape[1]].addcmul_(a, b)
    return total.sum((0, 1))


class _Taps(torch.autograd.Function):
    """y_t = sum_j taps[W-1-j] * x_{t-j} + bias."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, taps_WD: Tensor, bias_D: Tensor | None, segments: Tensor | None) -> Tensor:
        """Return y [B, T, D]."""
        ctx.save_for_backward(x_BTD, taps_WD, segments)
        ctx.biased = bias_D is not None
        T, W = x_BTD.shape[1], taps_WD.shape[0]
        y = x_BTD * taps_WD[-1] if bias_D is None else torch.addcmul(bias_D, x_BTD, taps_WD[-1])
        for lag in range(1, min(W, T)):
            y[:, lag:].addcmul_(_seen(x_BTD[:, : T - lag], segments, lag), taps_WD[-1 - lag])
        return y

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return the gradients of x, the taps and the bias."""
        refuse_batched_gradients("short_convolution", dy_BTD)
        x_BTD, taps_WD, segments = ctx.saved_tensors
        T, W = x_BTD.shape[1], taps_WD.shape[0]
        dx, dtaps = dy_BTD * taps_WD[-1], torch.zeros_like(taps_WD)
        dtaps[-1] = _summed_product(dy_BTD, x_BTD)
        for lag in range(1, min(W, T)):
            later = _seen(dy_BTD[:, lag:], segments, lag)
            dx[:, : T - lag].addcmul_(later, taps_WD[-1 - lag])
            dtaps[-1 - lag] = _summed_product(later, x_BTD[:, : T - lag])
        return dx, dtaps, dy_BTD.sum((0, 1)) if ctx.biased else None, None
