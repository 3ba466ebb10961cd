"""The definition of the RWKV-7 recurrence (arXiv 2503.14456), any dtype, one token at a time."""

import torch
from torch import Tensor


def wkv7(
    r_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V]; see `basecap.ops.wkv7.wkv7`."""
    B, T, H, K = r_BTHK.shape
    state = v_BTHV.new_zeros(B, H, K, v_BTHV.shape[3]) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(T):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        recalled_BHV = torch.einsum("bhk,bhkv->bhv", a_BTHK[:, t], state)
        state = (
            log_decay_BTHK[:, t].exp()[..., None] * state
            + b_BTHK[:, t, :, :, None] * recalled_BHV[:, :, None, :]
            + k_BTHK[:, t, :, :, None] * v_BTHV[:, t, :, None, :]
        )
        outputs.append(torch.einsum("bhk,bhkv->bhv", r_BTHK[:, t], state))
    return torch.stack(outputs, dim=1), state
