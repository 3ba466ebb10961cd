"""Arithmetic shared by Triton kernels: more accurate sums, exponentials and logarithms in float32."""

import triton
import triton.language as tl


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """Return total + a @ b, in float32 with every tile's product summed by itself.

    A product that starts from `total`, or is only added to it, is compiled to one chain of multiply-adds through all
    tiles, and rounding errors grow along a chain; cuBLAS, with which results are compared, cuts its chains too.
    """
    if a.dtype == tl.float32:
        # The factors change no bit, but they keep the compiler from fusing the sum into the product.
        out = total + 2.0 * tl.dot(0.5 * a, b, input_precision=PRECISION)
    else:
        out = tl.dot(a, b, total, input_precision=PRECISION)
    return out


@triton.jit
def exp(x, EXACT: tl.constexpr):
    """e^x; EXACT: by float64; otherwise by the hardware, wrong by about |x| in the last place."""
    if EXACT:
        return tl.exp(x.to(tl.float64)).to(tl.float32)
    return tl.exp(x)


@triton.jit
def exp2(x, EXACT: tl.constexpr):
    """2^x; EXACT: by float64, the same for equal x; otherwise by the hardware, wrong by up to two in the last place."""
    if EXACT:
        return tl.exp2(x.to(tl.float64)).to(tl.float32)
    return tl.exp2(x)


@triton.jit
def log2(x, EXACT: tl.constexpr):
    """The logarithm of base 2; EXACT as in `exp2`."""
    if EXACT:
        return tl.log2(x.to(tl.float64)).to(tl.float32)
    return tl.log2(x)
