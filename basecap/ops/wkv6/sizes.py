"""What the kernels of the recurrences and their operators agree on; known without Triton."""

import torch

#: Tokens between two states that the kernels by single tokens keep for backward; the states of one such chunk should
#: stay in the cache.
CHUNK = 32


def tokens_per_chunk(dtype: torch.dtype) -> int:
    """Return the chunk of the kernels by chunks; exact products of float32 leave room for half as many."""
    return 32 if dtype == torch.float32 else 64
