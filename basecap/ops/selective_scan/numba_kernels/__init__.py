"""The selective scan compiled by Numba, for CPUs; `launch` has forward and backward. See README.md."""

from torch import Tensor

from basecap.ops._dispatch import unsupported_by_numba

RUNS, BACKEND = "Numba kernels", "numba"

#: Tokens per chunk, and the most that are one chunk: what is rounded within a chunk adds up.
BT, WHOLE = 32, 128


def supports(x: Tensor) -> str | None:
    """Return why the kernels cannot run, or None."""
    return unsupported_by_numba(x.device, x.dtype)


def tokens_per_chunk(T: int) -> int:
    """Return the tokens per chunk for sequences of T."""
    return T if T <= WHOLE else BT


def kept_shape(x_BTD: Tensor, A_DN: Tensor) -> tuple[int, int, int, int]:
    """Return the shape [B, M, N, D] of the states that `forward` keeps, one before each chunk."""
    B, T, D = x_BTD.shape
    return B, -(-T // tokens_per_chunk(T)), A_DN.shape[1], D
