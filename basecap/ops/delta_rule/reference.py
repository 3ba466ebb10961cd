"""The definition of the gated delta rule, any dtype, one token at a time."""

import torch
from torch import Tensor


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None = None,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V]; see `basecap.ops.delta_rule.delta_rule`."""
    B, T, H, V = v_BTHV.shape
    state = v_BTHV.new_zeros(B, H, q_BTHK.shape[3], V) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(T):
        q, k, v, beta = q_BTHK[:, t], k_BTHK[:, t], v_BTHV[:, t], beta_BTH[:, t, :, None]
        if log_decay_BTH is not None:
            state = log_decay_BTH[:, t, :, None, None].exp() * state
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        correction = beta * (v - torch.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., :, None] * correction[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q, state))
    return torch.stack(outputs, dim=1), state
