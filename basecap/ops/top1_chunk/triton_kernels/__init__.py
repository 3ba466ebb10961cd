"""Top-1 chunk selection in Triton, for every GPU from compute capability 8.0 on.

`launch` has the functions of `eager`, except for `decode`.
"""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton

RUNS, BACKEND = TRITON, "triton"

#: What its backward pass adds atomically is at most two numbers to a zero, of which either order has the same sum.
REPEATS = True

#: Bytes of shared memory a block of the kernels takes at most: what an A100 has.
SHARED = 163 * 1024


def supports(q: Tensor, chunk: int) -> str | None:
    """Return why the kernels cannot run on queries [..., K] and chunks of this size, or None."""
    return unsupported_by_triton(q, widest=256, shared=SHARED)
