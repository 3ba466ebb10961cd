"""The short convolution in Triton; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton
from basecap.ops._transforms import refuse_transforms
from basecap.ops.short_convolution.triton_kernels import operators

RUNS, BACKEND = TRITON, "triton"

#: The widest convolution of the kernels, which keep a window of this many tokens in registers.
WIDEST = 8


def supports(x_BTD: Tensor, width: int) -> str | None:
    """Return why the kernels cannot run, or None."""
    return unsupported_by_triton(x_BTD) if width <= WIDEST else f"they take widths up to {WIDEST}, not {int(width)}"


def short_convolution(
    x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, segments: Tensor | None, silu: bool
) -> Tensor:
    """Return [B, T, D] in the dtype of x."""
    refuse_transforms("short_convolution", x_BTD, weight_DW, bias_D)
    taps_WD = weight_DW.float().T.contiguous()
    y_BTD: Tensor = operators.convolve(x_BTD, taps_WD, None if bias_D is None else bias_D.float(), segments, silu)
    return y_BTD
