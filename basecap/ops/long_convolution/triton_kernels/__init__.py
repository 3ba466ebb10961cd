"""Long convolutions as products with matrices of taps, in Triton; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton
from basecap.ops._transforms import refuse_transforms
from basecap.ops.long_convolution.triton_kernels import operators

RUNS, BACKEND = TRITON, "triton"

#: Tokens per block.
BT = 64
#: Bytes of shared memory that a program takes at most, in 16 bits, on GPUs with little of it.
SHARED = 72 * 1024
#: The most taps for which "auto" takes the kernels: their work grows with the number of taps, that of the FFT with its
#: logarithm.
LONGEST = 4096


def supports(u_BTD: Tensor, segments: Tensor | None) -> str | None:
    """Return why the kernels cannot run, or None."""
    B, T, D = u_BTD.shape
    if segments is not None:
        return "they take no segments"
    return unsupported_by_triton(u_BTD, shared=SHARED, programs=max(B, D, -(-T // BT)))


def slower(u_BTD: Tensor, filter_LD: Tensor) -> str | None:
    """Return why the FFT is faster than the kernels, or None."""
    if u_BTD.element_size() != 2:
        return "in more than 16 bits the FFT is faster"
    if min(len(filter_LD), u_BTD.shape[1]) > LONGEST:
        return f"for more than {LONGEST} taps the FFT is faster"
    return None


def long_convolution(u_BTD: Tensor, filter_LD: Tensor, segments: Tensor | None) -> Tensor:
    """Return [B, T, D]; `segments` are None."""
    refuse_transforms("long_convolution", u_BTD, filter_LD)
    y_BTD: Tensor = operators.convolve(u_BTD, filter_LD)
    return y_BTD
