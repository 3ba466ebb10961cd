"""Long convolutions through PyTorch's FFT."""

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER

RUNS, BACKEND = EAGER, "eager"


def supports(u_BTD: Tensor, segments: Tensor | None) -> None:
    """Return None: this runs everywhere."""


def long_convolution(u_BTD: Tensor, filter_LD: Tensor, segments: Tensor | None) -> Tensor:
    """Return [B, T, D], computed in float32 or wider."""
    return _whole(u_BTD, filter_LD) if segments is None else _packed(u_BTD, filter_LD, segments)


def _whole(u_BTD: Tensor, filter_LD: Tensor) -> Tensor:
    """Return [B, T, D], each row one sequence."""
    wide = torch.promote_types(u_BTD.dtype, torch.float32)
    T = u_BTD.shape[1]
    # Time last: the FFT is much faster along contiguous memory.
    u_BDT, filter_DL = u_BTD.to(wide).mT.contiguous(), filter_LD[:T].to(wide).T.contiguous()
    # Long enough that no output wraps around; powers of two are the fastest.
    n = 1 << (T + filter_DL.shape[1] - 2).bit_length()
    return _circular(u_BDT, filter_DL, n)[..., :T].mT.to(u_BTD.dtype)


def _packed(u_BTD: Tensor, filter_LD: Tensor, segments: Tensor) -> Tensor:
    """Return [B, T, D] for packed segments, by halving.

    In a block of 2m positions, inputs of the left half reach outputs of the right half only within the segment that
    spans the middle: one convolution between two masks. Each half is then a block itself.
    """
    wide = torch.promote_types(u_BTD.dtype, torch.float32)
    T = u_BTD.shape[1]
    whole = 1 << (T - 1).bit_length()
    u_BDT = F.pad(u_BTD.to(wide).mT, (0, whole - T))
    filter_DL = filter_LD[:T].to(wide).T
    ids_BT = torch.cat([segments, segments[:, -1:].expand(-1, whole - T)], dim=1)
    y_BDT = u_BDT * filter_DL[:, :1]
    m = 1
    while m < whole:
        blocks, ids = u_BDT.unflatten(2, (-1, 2 * m)), ids_BT.unflatten(1, (-1, 2 * m))[:, None]
        spans = ids == ids[..., m - 1 : m]
        left = (blocks * spans)[..., :m]
        # Of the 3m - 1 outputs those from m to 2m - 1 are wanted; what wraps around falls on those before m.
        right = _circular(left, filter_DL[:, None, : 2 * m], 2 * m)[..., m:] * spans[..., m:]
        y_BDT = y_BDT + F.pad(right, (m, 0)).flatten(2)
        m *= 2
    return y_BDT[..., :T].mT.to(u_BTD.dtype)


def _circular(u: Tensor, taps: Tensor, n: int) -> Tensor:
    """Convolve along the last dimension, modulo n."""
    return torch.fft.irfft(torch.fft.rfft(u, n) * torch.fft.rfft(taps, n), n)
