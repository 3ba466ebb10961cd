"""The definition of attention with forget gates, any dtype, T x T in memory."""

import torch
from torch import Tensor

from basecap.ops._dispatch import without_autocast
from basecap.ops._influence import visible


def weights(
    q_BTHK: Tensor, k_BTHK: Tensor, log_decay_BTH: Tensor, scale: float, segments: Tensor | None = None
) -> Tensor:
    """Return the attention distribution [B, H, T, T]."""
    T = q_BTHK.shape[1]
    # Autocast would round the scores.
    with without_autocast(q_BTHK.device):
        scores_BHTT = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * scale
    # Row t, column s: the gates of s + 1 to t.
    gates_BHTT = log_decay_BTH.mT[..., None].expand(-1, -1, -1, T).tril(-1)
    seen = visible(T, segments, q_BTHK.device)
    return (scores_BHTT + gates_BHTT.cumsum(2)).masked_fill(~seen, float("-inf")).softmax(-1)


def attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    scale: float,
    segments: Tensor | None = None,
) -> Tensor:
    """Return [B, T, H, V] in the dtype of v."""
    factors_BHTT = weights(q_BTHK, k_BTHK, log_decay_BTH, scale, segments)
    return torch.einsum("bhts,bshv->bthv", factors_BHTT.to(v_BTHV.dtype), v_BTHV)
