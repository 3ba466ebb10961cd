"""Top-1 element selection in Triton; `launch` has the functions of `eager`."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton

RUNS, BACKEND = TRITON, "triton"


def supports(q: Tensor) -> str | None:
    """Return why the kernels cannot run, or None."""
    return unsupported_by_triton(q, widest=256)
