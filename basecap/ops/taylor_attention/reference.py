"""The definition of Taylor attention, any dtype, T x T in memory."""

import torch
from torch import Tensor


def weights(q_BTHK: Tensor, k_BTHK: Tensor, segments: Tensor | None = None, eps: float = 1e-12) -> Tensor:
    """Return [B, H, T, T], the normalised weights w_ts / (sum_s w_ts + eps) in front of v_s in o_t."""
    T, _, K = q_BTHK.shape[1:]
    x_BHTT = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) / K**0.5
    visible = torch.ones(T, T, dtype=torch.bool, device=q_BTHK.device).tril()
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    w_BHTT = (1 + x_BHTT + x_BHTT**2 / 2) * visible
    return w_BHTT / (w_BHTT.sum(-1, keepdim=True) + eps)


def taylor_attention(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, segments: Tensor | None = None, eps: float = 1e-12
) -> Tensor:
    """Return outputs [B, T, H, V]; see `basecap.ops.taylor_attention.taylor_attention`."""
    return torch.einsum("bhts,bshv->bthv", weights(q_BTHK, k_BTHK, segments, eps), v_BTHV)
