"""The selective scan in Triton, for GPUs; `launch` has forward and backward. See README.md."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton

RUNS, BACKEND = TRITON, "triton"

#: Tokens per chunk: a warp's lanes hold neighbouring channels, their registers the tokens, so that the scans need no
#: exchange between lanes.
BT = 16


def supports(x: Tensor) -> str | None:
    """Return why the kernels cannot run, or None."""
    return unsupported_by_triton(x, programs=len(x))


def kept_shape(x_BTD: Tensor, A_DN: Tensor) -> tuple[int, int, int, int]:
    """Return the shape [B, M, N, D] of the states that `forward` keeps, one before each chunk."""
    B, T, D = x_BTD.shape
    return B, -(-T // BT), A_DN.shape[1], D
