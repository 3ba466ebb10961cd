"""What the kernels of the selective scan and its operators agree on; known without Triton and Numba."""

from torch import Tensor

#: Tokens per chunk of the Triton kernels: a warp's lanes hold neighbouring channels, their registers the tokens, so
#: that the scans need no exchange between lanes.
BT = 16
#: Tokens per chunk on a CPU: the decays and states of that many fit a core's cache.
BT_CPU = 128


def kept_shape(x_BTD: Tensor, A_DN: Tensor, run: str = "triton") -> tuple[int, int, int, int]:
    """Return the shape [B, M, N, D] of the states that the kernels of `run` keep, one before each chunk."""
    B, T, D = x_BTD.shape
    return B, -(-T // (BT if run == "triton" else BT_CPU)), A_DN.shape[1], D
