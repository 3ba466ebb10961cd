"""Launches the Triton kernels of the short convolution."""

import math

import torch
import triton
from torch import Tensor

from basecap.ops._launch import registers
from basecap.ops.short_convolution.triton_kernels import kernels

#: Channels per program: a warp's 32 lanes hold 4 neighbours each.
BD = 128
#: Rows that a program loads at a time, so that their loads wait for memory together.
GROUP = 4
#: Programs along the tokens of a batch: enough to fill a GPU; backward few, so that partial sums are little traffic.
PROGRAMS = 1024
PROGRAMS_BACKWARD = 512


def _span(x_BTD: Tensor, W: int, programs: int, halo: int = 0) -> int:
    """Tokens per program, at least W - 1, so that these and the `halo` tokens after them are whole groups."""
    B, T, _ = x_BTD.shape
    span = max(triton.cdiv(B * T, programs), W - 1)
    return triton.cdiv(span + halo, GROUP) * GROUP - halo


def _strided(x_BTD: Tensor) -> tuple[Tensor, int, int, int]:
    """x with its channels side by side, and the strides of batch and tokens in multiples of the last number."""
    x = x_BTD if x_BTD.stride(2) == 1 else x_BTD.contiguous()
    align = math.gcd(x.stride(0), x.stride(1), 16)
    return x, x.stride(0) // align, x.stride(1) // align, align


def forward(x_BTD: Tensor, taps_WD: Tensor, bias_D: Tensor | None, segments: Tensor | None, silu: bool) -> Tensor:
    """Return [B, T, D] in the dtype of x; taps and bias in float32."""
    (B, T, D), W = x_BTD.shape, len(taps_WD)
    x, x_batch, x_token, align = _strided(x_BTD)
    y = x.new_empty(B, T, D)
    span = _span(x, W, PROGRAMS)
    kernels.short_convolution_fwd_kernel[(B * triton.cdiv(T, span) * triton.cdiv(D, BD),)](
        x, taps_WD.contiguous(), None if bias_D is None else bias_D.contiguous(),
        None if segments is None else segments.contiguous(), y, T, D, span, x_batch, x_token,
        W=W, SILU=silu, X_ALIGN=align, GROUP=GROUP, BD=BD, num_warps=1,
    )  # fmt: skip
    return y


def backward(
    dy_BTD: Tensor, x_BTD: Tensor, taps_WD: Tensor, bias_D: Tensor | None, segments: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and [W + 1, D] of the taps and, last, the bias."""
    (B, T, D), W = x_BTD.shape, len(taps_WD)
    x, x_batch, x_token, x_align = _strided(x_BTD)
    dy, dy_batch, dy_token, dy_align = _strided(dy_BTD)
    dx = x.new_empty(B, T, D)
    span = _span(x, W, PROGRAMS_BACKWARD, halo=W - 1)
    rows = B * triton.cdiv(T, span)
    # As few as hold the windows: the compiler would take twice as many to little use, and fewer programs would run.
    most = min(32 * max(W + (segments is not None) + (x.dtype == torch.float32), 4), 255)
    parts = torch.empty(rows, W + 1, D, dtype=torch.float32, device=x.device)
    kernels.short_convolution_bwd_kernel[(rows * triton.cdiv(D, BD),)](
        dy, x, taps_WD.contiguous(), None if bias_D is None else bias_D.contiguous(),
        None if segments is None else segments.contiguous(), dx, parts,
        T, D, span, x_batch, x_token, dy_batch, dy_token,
        W=W, SILU=silu, X_ALIGN=x_align, DY_ALIGN=dy_align, GROUP=GROUP, BD=BD, num_warps=1, **registers(most),
    )  # fmt: skip
    return dx, parts.sum(0)
