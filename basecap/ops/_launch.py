"""Helpers for launching Triton kernels."""

from torch import Tensor


def block_of(channels: int) -> int:
    """Return the block size for a number of channels: a power of two, at least 16, as matrix products need."""
    return max(16, 1 << (channels - 1).bit_length())


def dense(x: Tensor) -> Tensor:
    """Return x, or a copy of it, with stride 1 in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
