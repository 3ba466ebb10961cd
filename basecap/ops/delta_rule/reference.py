"""The definition of the gated delta rule, any dtype, one token at a time."""

import torch
from torch import Tensor


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor | None = None,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V]; see `basecap.ops.delta_rule.delta_rule`.

    `log_decay` is [B, T, H], or [B, T, H, K] as for `channel_delta_rule`.
    """
    B, T, H, V = v_BTHV.shape
    state = v_BTHV.new_zeros(B, H, q_BTHK.shape[3], V) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(T):
        q, k, v, beta = q_BTHK[:, t], k_BTHK[:, t], v_BTHV[:, t], beta_BTH[:, t, :, None]
        if log_decay is not None:
            decay = log_decay[:, t].exp()
            state = (decay if decay.dim() == 3 else decay[..., None])[..., None] * state
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        correction = beta * (v - torch.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., :, None] * correction[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q, state))
    return torch.stack(outputs, dim=1), state


def decoupled_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    erase_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state; see `basecap.ops.delta_rule.decoupled_delta_rule`."""
    B, T, H, V = v_BTHV.shape
    state = v_BTHV.new_zeros(B, H, q_BTHK.shape[3], V) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(T):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        state = log_decay_BTHK[:, t, ..., None].exp() * state
        found = torch.einsum("bhk,bhkv->bhv", erase_BTHK[:, t] * k_BTHK[:, t], state)
        state = state + k_BTHK[:, t, ..., None] * (v_BTHV[:, t] - found)[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_BTHK[:, t], state))
    return torch.stack(outputs, dim=1), state
