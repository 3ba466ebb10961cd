"""A sum of products over tiles, for the Triton kernels of all operators."""

import triton
import triton.language as tl


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """Return total + a @ b, in float32 with every tile's product summed by itself.

    A product that starts from `total`, or is only added to it, is compiled to one chain of multiply-adds through all
    tiles, and rounding errors grow along a chain; cuBLAS, with which results are compared, cuts its chains too.
    """
    if a.dtype == tl.float32:
        # The factors change no bit, but the compiler does not see through them.
        out = total + 2.0 * tl.dot(0.5 * a, b, input_precision=PRECISION)
    else:
        out = tl.dot(a, b, total, input_precision=PRECISION)
    return out
