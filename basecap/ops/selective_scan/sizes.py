"""What the kernels of the selective scan and its operators agree on; known without Triton and Numba."""

from torch import Tensor

#: Tokens per chunk of the Triton kernels: a warp's lanes hold neighbouring channels, their registers the tokens, so
#: that the scans need no exchange between lanes.
BT = 16
#: Tokens per chunk on a CPU, and the most that are one chunk: what is rounded within a chunk adds up.
BT_CPU, WHOLE = 32, 128


def chunk_cpu(T: int) -> int:
    """Return the tokens per chunk of the kernels of the CPU for sequences of T."""
    return T if T <= WHOLE else BT_CPU


def kept_shape(x_BTD: Tensor, A_DN: Tensor, run: str = "triton") -> tuple[int, int, int, int]:
    """Return the shape [B, M, N, D] of the states that the kernels of `run` keep, one before each chunk."""
    B, T, D = x_BTD.shape
    return B, -(-T // (BT if run == "triton" else chunk_cpu(T))), A_DN.shape[1], D
