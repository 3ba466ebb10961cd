"""What the kernels of the selective scan and its operators agree on; known without Triton."""

from torch import Tensor

#: Tokens per chunk of the kernels: a warp's lanes hold neighbouring channels, their registers the tokens, so that the
#: scans need no exchange between lanes.
BT = 16


def kept_shape(x_BTD: Tensor, A_DN: Tensor) -> tuple[int, int, int, int]:
    """Return the shape [B, M, N, D] of the states that the kernels keep, one before each chunk."""
    B, T, D = x_BTD.shape
    return B, -(-T // BT), A_DN.shape[1], D
