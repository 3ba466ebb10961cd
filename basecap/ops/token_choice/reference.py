"""The definition of the choice of tokens and of the indexer's loss, any dtype, T x T in memory."""

import torch
from torch import Tensor

from basecap.ops._influence import visible


def index_scores(q_BTIJ: Tensor, k_BTJ: Tensor, weights_BTI: Tensor) -> Tensor:
    """Return the scores of all pairs [B, T, T]."""
    return torch.einsum("btis,bti->bts", torch.einsum("btij,bsj->btis", q_BTIJ, k_BTJ).relu(), weights_BTI)


def mass(q_BTHK: Tensor, k_BTGK: Tensor, seen_BTT: Tensor) -> Tensor:
    """Return the mean attention distribution of the heads [B, T, T]."""
    k_BTHK = k_BTGK.repeat_interleave(q_BTHK.shape[2] // k_BTGK.shape[2], dim=2)
    scores_BHTT = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * q_BTHK.shape[3] ** -0.5
    return scores_BHTT.masked_fill(~seen_BTT[:, None], float("-inf")).softmax(-1).mean(1)


def chosen(scores_BTT: Tensor, seen_BTT: Tensor, top: int) -> Tensor:
    """Return bool [B, T, T], the first `top` of the tokens seen, sorted by score and then by position, both falling."""
    order = scores_BTT.masked_fill(~seen_BTT, float("-inf")).flip(-1).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1).flip(-1)
    return (rank < top) & seen_BTT


def seen(x_BT: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return bool [B, T, T], what each query sees."""
    B, T = x_BT.shape[:2]
    return visible(T, segments, x_BT.device)[:, 0].expand(B, -1, -1)


def divergence(
    index_q_BTIJ: Tensor,
    index_k_BTJ: Tensor,
    weights_BTI: Tensor,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    seen_BTT: Tensor,
) -> Tensor:
    """Return the mean over queries of the divergence of the index scores from the mass of the tokens seen."""
    target = mass(q_BTHK.detach(), k_BTGK.detach(), seen_BTT)
    scores = index_scores(index_q_BTIJ, index_k_BTJ, weights_BTI).masked_fill(~seen_BTT, float("-inf"))
    logarithms = scores.log_softmax(-1).masked_fill(~seen_BTT, 0.0)
    return (torch.xlogy(target, target) - target * logarithms).sum(-1).mean()
