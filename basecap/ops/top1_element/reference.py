"""The definition of Top-1 element selection (arXiv 2505.18522, section 4), any dtype, T x T in memory."""

import torch
from torch import Tensor


def scores(q_BTHK: Tensor, k_BTGK: Tensor, scale: float, segments: Tensor | None = None) -> Tensor:
    """Return the causal scores [B, H, T, T], -inf where not visible."""
    T = q_BTHK.shape[1]
    k_BTHK = k_BTGK.repeat_interleave(q_BTHK.shape[2] // k_BTGK.shape[2], dim=2)
    s_BHTT = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * scale
    t = torch.arange(T, device=q_BTHK.device)
    visible = (t[:, None] >= t)[None]
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None])
    return s_BHTT.masked_fill(~visible[:, None], float("-inf"))


def one_hot(scores_BHTT: Tensor) -> Tensor:
    """Return [B, H, T, T], 1 at the first of the highest scores of each query, else 0; a NaN is the lowest."""
    scores_BHTT = scores_BHTT.masked_fill(scores_BHTT.isnan(), torch.finfo(scores_BHTT.dtype).min)
    best = scores_BHTT == scores_BHTT.amax(-1, keepdim=True)
    return (best & (best.cumsum(-1) == 1)).to(scores_BHTT.dtype)


def top1_element(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    scale: float,
    segments: Tensor | None = None,
    one_hot_BHTT: Tensor | None = None,
) -> Tensor:
    """Return [B, T, H, K], the chosen values; the gradient of the choice is that of the softmax (straight through)."""
    s_BHTT = scores(q_BTHK, k_BTGK, scale, segments)
    hard = one_hot(s_BHTT.detach()) if one_hot_BHTT is None else one_hot_BHTT
    soft = s_BHTT.softmax(-1)
    v_BTHK = v_BTGK.repeat_interleave(q_BTHK.shape[2] // v_BTGK.shape[2], dim=2)
    return torch.einsum("bhts,bshk->bthk", hard + soft - soft.detach(), v_BTHK)
