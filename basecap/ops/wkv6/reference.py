"""The definition of the RWKV-5 and RWKV-6 recurrence (arXiv 2404.05892), any dtype, one token at a time."""

import torch
from torch import Tensor


def wkv6(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V]; see `basecap.ops.wkv6.wkv6`."""
    B, T, H, K = r_BTHK.shape
    decay_BTHK = log_decay_BTHK.exp().expand(B, T, H, K)
    state = v_BTHV.new_zeros(B, H, K, v_BTHV.shape[3]) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(T):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        written = k_BTHK[:, t, :, :, None] * v_BTHV[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", r_BTHK[:, t], state + bonus_HK[..., None] * written))
        state = decay_BTHK[:, t, :, :, None] * state + written
    return torch.stack(outputs, dim=1), state
