"""Helpers for launching Triton kernels."""

import torch
from torch import Tensor


def block_of(channels: int) -> int:
    """Return the block size for a number of channels: a power of two, at least 16, as matrix products need."""
    return max(16, 1 << (channels - 1).bit_length())


def registers(most: int | None) -> dict[str, int | None]:
    """Return the option that limits the registers of a thread; Triton refuses it on AMD's GPUs, which take none."""
    return {} if torch.version.hip else {"maxnreg": most}


def three_tf32() -> str:
    """Return the precision of float32 products as sums of three in TF32; Triton has exact ones alone on AMD's GPUs."""
    return "ieee" if torch.version.hip else "tf32x3"


def dense(x: Tensor) -> Tensor:
    """Return x, or a copy of it, with stride 1 in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def first_tokens(segments: Tensor | None) -> Tensor | None:
    """Return the first token of each token's segment, int32 [B, T], as numbers do not decrease; None without any."""
    if segments is None:
        return None
    # PyTorch searches no truth values.
    ids = (segments.to(torch.uint8) if segments.dtype == torch.bool else segments).contiguous()
    return torch.searchsorted(ids, ids, out_int32=True)
