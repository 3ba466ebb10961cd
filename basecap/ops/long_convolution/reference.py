"""The definition of the long convolution, any dtype, O(T^2)."""

import torch
from torch import Tensor


def toeplitz(filter_LD: Tensor, length: int) -> Tensor:
    """Return [D, T, T], the factor filter_{t-s} in front of u_s in y_t."""
    t = torch.arange(length, device=filter_LD.device)
    lag = t[:, None] - t[None, :]
    last = filter_LD.shape[0] - 1
    reached = (lag >= 0) & (lag <= last)
    return filter_LD[lag.clamp(0, last)].permute(2, 0, 1) * reached


def long_convolution(u_BTD: Tensor, filter_LD: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return [B, T, D]; see `basecap.ops.long_convolution.long_convolution`."""
    matrix_BDTT = toeplitz(filter_LD, u_BTD.shape[1])[None]
    if segments is not None:
        matrix_BDTT = matrix_BDTT * (segments[:, None, :, None] == segments[:, None, None, :])
    return torch.einsum("bdts,bsd->btd", matrix_BDTT.expand(len(u_BTD), -1, -1, -1), u_BTD)
