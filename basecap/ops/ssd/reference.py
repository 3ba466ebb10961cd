"""The definition of the scalar-decay state-space recurrence, any dtype, one token at a time."""

import torch
from torch import Tensor


def ssd(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V]; see `basecap.ops.ssd.ssd`."""
    B, T, H, V = v_BTHV.shape
    repeat = H // q_BTGK.shape[2]
    q_BTHK, k_BTHK = (x.repeat_interleave(repeat, dim=2) for x in (q_BTGK, k_BTGK))
    state = v_BTHV.new_zeros(B, H, q_BTGK.shape[3], V) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(T):
        kept = torch.exp(log_decay_BTH[:, t])
        if segments is not None and t > 0:
            kept = kept * (segments[:, t] == segments[:, t - 1])[:, None]
        state = kept[..., None, None] * state + k_BTHK[:, t, :, :, None] * v_BTHV[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_BTHK[:, t], state))
    return torch.stack(outputs, dim=1), state


def factors(q_BTHK: Tensor, k_BTHK: Tensor, log_decay_BTH: Tensor) -> Tensor:
    """Return [B, H, T, T], q_t . k_s prod_{s<r<=t} decay_r, whose upper triangle means nothing."""
    B, T, H = log_decay_BTH.shape
    # Sums over s < r <= t, without the cancellation in a difference of two longer sums.
    exponent = log_decay_BTH.transpose(1, 2)[..., None].expand(B, H, T, T).tril(-1).cumsum(-2)
    return torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * exponent.exp()
