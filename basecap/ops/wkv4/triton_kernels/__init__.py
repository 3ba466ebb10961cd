"""The weighted averages in Triton, by chunks of tokens; `launch` has the functions of `eager`."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton

RUNS, BACKEND = TRITON, "triton"


def supports(v_BTD: Tensor) -> str | None:
    """Return why the kernels cannot run, or None."""
    return unsupported_by_triton(v_BTD, programs=len(v_BTD))
