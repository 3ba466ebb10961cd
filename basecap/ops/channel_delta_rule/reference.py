"""The definition of the delta rule by channel, any dtype, one token at a time."""

import torch
from torch import Tensor


def channel_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    erased_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V].

    `erased` is what the state is read with before token t writes, and values come with their writing strengths: beta k
    and beta v make it `channel_delta_rule` of this package, e * k `decoupled_delta_rule`.
    """
    B, T, H, V = v_BTHV.shape
    state = v_BTHV.new_zeros(B, H, q_BTHK.shape[3], V) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(T):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        state = log_decay_BTHK[:, t, ..., None].exp() * state
        found = torch.einsum("bhk,bhkv->bhv", erased_BTHK[:, t], state)
        state = state + k_BTHK[:, t, ..., None] * (v_BTHV[:, t] - found)[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_BTHK[:, t], state))
    return torch.stack(outputs, dim=1), state
