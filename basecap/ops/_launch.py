"""What the launches of the Triton kernels share."""

from torch import Tensor


def block_of(channels: int) -> int:
    """Return the size of a block that holds so many channels: a power of two, at least 16, as products need."""
    return max(16, 1 << (channels - 1).bit_length())


def dense(x: Tensor) -> Tensor:
    """Return x, or a copy of it, whose last dimension has its numbers side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
