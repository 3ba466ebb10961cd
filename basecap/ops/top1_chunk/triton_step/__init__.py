"""One decoding step of Top-1 chunk selection in Triton; `launch` has `decode` of `eager`."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton

RUNS, BACKEND = TRITON, "triton"


def supports(q: Tensor, chunk: int) -> str | None:
    """Return why the kernels cannot run on queries [..., K] and chunks of this size, or None."""
    return unsupported_by_triton(q, widest=256, programs=len(q))
