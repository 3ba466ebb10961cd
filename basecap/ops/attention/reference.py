"""The definition of causal attention and of its entropy, any dtype, T x T in memory."""

import torch
from torch import Tensor

from basecap.ops._dispatch import without_autocast


def weights(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    scale: float,
    window: int | None = None,
    slopes: Tensor | None = None,
    segments: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention distribution [B, H, T, T]; with sinks its sums are below 1."""
    B, T, H, _ = q_BTHK.shape
    k_BTHK = k_BTGK.repeat_interleave(H // k_BTGK.shape[2], dim=2)
    # Autocast would round the scores.
    with without_autocast(q_BTHK.device):
        scores_BHTT = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * scale
    t = torch.arange(T, device=q_BTHK.device)
    distance = t[:, None] - t[None, :]
    if slopes is not None:
        scores_BHTT = scores_BHTT - (slopes.double()[:, None, None] * distance).to(scores_BHTT.dtype)
    visible = (distance >= 0).expand(B, T, T)
    if window is not None:
        visible = visible & (distance < window)
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None, :])
    scores_BHTT = scores_BHTT.masked_fill(~visible[:, None], float("-inf"))
    if sinks is None:
        return scores_BHTT.softmax(-1)
    sinks_BHT1 = sinks.to(scores_BHTT.dtype)[:, None, None].expand(*scores_BHTT.shape[:3], 1)
    return torch.cat([scores_BHTT, sinks_BHT1], dim=-1).softmax(-1)[..., :-1]


def attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    scale: float,
    window: int | None = None,
    slopes: Tensor | None = None,
    segments: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return [B, T, H, V]."""
    v_BTHV = v_BTGV.repeat_interleave(q_BTHK.shape[2] // v_BTGV.shape[2], dim=2)
    factors_BHTT = weights(q_BTHK, k_BTGK, scale, window, slopes, segments, sinks)
    return torch.einsum("bhts,bshv->bthv", factors_BHTT, v_BTHV)


def entropy(weights_BHTT: Tensor) -> Tensor:
    """Return [B, H, T], the entropy in nats of each query's distribution, -sum_s p log p (arXiv 2505.18522, Fig. 4)."""
    return torch.special.entr(weights_BHTT).sum(-1)
