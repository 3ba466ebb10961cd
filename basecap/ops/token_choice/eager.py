"""The choice of tokens and the indexer's loss in plain PyTorch, some queries at a time."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER, without_autocast
from basecap.ops._sums import exact_dtype

RUNS, BACKEND = EAGER, "eager"

#: Queries that are scored at once: scores of all pairs of tokens would not fit in memory.
QUERIES = 128


def supports(*queries_BTXK: Tensor) -> None:
    """Return None: this runs everywhere."""


def index_scores(q_BQIJ: Tensor, k_BSJ: Tensor, weights_BQI: Tensor) -> Tensor:
    """Return sum_i w_i ReLU(q_i.k) [B, Q, S], in float32 or wider (arXiv 2512.02556, eq. 1)."""
    wide = torch.promote_types(q_BQIJ.dtype, torch.float32)
    q, k, weights = (x.to(wide) for x in (q_BQIJ, k_BSJ, weights_BQI))
    with without_autocast(q.device):
        return _weighted(_products(q, k), weights)


def _products(q_BQIJ: Tensor, k_BSJ: Tensor) -> Tensor:
    return torch.einsum("bqij,bsj->bqis", q_BQIJ, k_BSJ).relu()


def _weighted(products_BQIS: Tensor, weights_BQI: Tensor) -> Tensor:
    return torch.einsum("bqis,bqi->bqs", products_BQIS, weights_BQI)


@torch.no_grad()
def mass(q_BQHK: Tensor, k_BSGK: Tensor, seen_BQS: Tensor) -> Tensor:
    """Return the mean attention distribution of the heads over what a query sees [B, Q, S], in float32 or wider."""
    wide = torch.promote_types(q_BQHK.dtype, torch.float32)
    q, k = q_BQHK.to(wide).unflatten(2, (k_BSGK.shape[2], -1)) * q_BQHK.shape[3] ** -0.5, k_BSGK.to(wide)
    with without_autocast(q.device):
        scores = torch.einsum("bqgrk,bsgk->bgrqs", q, k)
    return scores.masked_fill(~seen_BQS[:, None, None], float("-inf")).softmax(-1).mean((1, 2))


@torch.no_grad()
def best(scores_BQS: Tensor, seen_BQS: Tensor, top: int) -> Tensor:
    """Return bool [B, Q, S]: the `top` tokens with the largest scores of those seen; of equal ones the latest."""
    scores = scores_BQS.masked_fill(~seen_BQS, float("-inf"))
    count = min(top, scores.shape[-1])
    least = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > least, (scores == least) & seen_BQS
    rank = equal.cumsum(-1, dtype=torch.int32)
    missing = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (equal & (rank > rank[..., -1:] - missing))


def choose_by_index(q_BTIJ: Tensor, k_BTJ: Tensor, weights_BTI: Tensor, segments: Tensor | None, top: int) -> Tensor:
    """Return bool [B, T, T], the tokens that each query reads."""
    parts = []
    for now in _blocks(q_BTIJ.shape[1]):
        scores = index_scores(q_BTIJ[:, now], k_BTJ[:, : now.stop], weights_BTI[:, now])
        parts.append(_chosen(scores, _seen(now, q_BTIJ, segments), top, q_BTIJ.shape[1]))
    return torch.cat(parts, dim=1)


def choose_by_mass(q_BTHK: Tensor, k_BTGK: Tensor, segments: Tensor | None, top: int) -> Tensor:
    """Return bool [B, T, T], the tokens that each query reads."""
    parts = []
    for now in _blocks(q_BTHK.shape[1]):
        seen = _seen(now, q_BTHK, segments)
        scores = mass(q_BTHK[:, now], k_BTGK[:, : now.stop], seen)
        parts.append(_chosen(scores, seen, top, q_BTHK.shape[1]))
    return torch.cat(parts, dim=1)


def divergence(
    index_q_BTIJ: Tensor,
    index_k_BTJ: Tensor,
    weights_BTI: Tensor,
    heads: Sequence[Tensor],
    chosen_BTT: Tensor | None,
    segments: Tensor | None,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean divergence, and gradients of its sum over queries; see `operators.diverge`."""
    (B, T), (q, k) = index_q_BTIJ.shape[:2], heads
    wide = torch.promote_types(index_q_BTIJ.dtype, torch.float32)
    index = [x.to(wide) for x in (index_q_BTIJ, index_k_BTJ, weights_BTI)]
    dq, dk, dweights = (torch.zeros_like(x) if learn else x.new_empty(0) for x in index)
    total = torch.zeros((), dtype=exact_dtype(q.device), device=q.device)
    for now in _blocks(T):
        seen = _seen(now, q, segments) if chosen_BTT is None else chosen_BTT[:, now, : now.stop]
        target = mass(q[:, now], k[:, : now.stop], seen)
        own_q, own_k, own_weights = index[0][:, now], index[1][:, : now.stop], index[2][:, now]
        products = _products(own_q, own_k)
        scores = _weighted(products, own_weights).masked_fill(~seen, float("-inf"))
        logarithms = scores.log_softmax(-1)
        total += (torch.xlogy(target, target) - target * logarithms.masked_fill(~seen, 0.0)).sum()
        if learn:
            dscores = logarithms.exp() - target
            dweights[:, now] = torch.einsum("bqis,bqs->bqi", products, dscores)
            dproducts = (products > 0) * dscores[:, :, None] * own_weights[..., None]
            dq[:, now] = torch.einsum("bqis,bsj->bqij", dproducts, own_k)
            dk[:, : now.stop] += torch.einsum("bqis,bqij->bsj", dproducts, own_q)
    return (total / max(1, B * T)).to(wide), dq, dk, dweights


def _blocks(T: int) -> list[slice]:
    """Return the queries that are scored at once."""
    return [slice(first, min(first + QUERIES, T)) for first in range(0, T, QUERIES)]


def _seen(now: slice, x_BT: Tensor, segments: Tensor | None) -> Tensor:
    """Return bool [B, Q, S], what the queries of `now` see of the tokens up to its end."""
    s = torch.arange(now.stop, device=x_BT.device)
    seen = (s[now, None] >= s)[None]
    seen = seen if segments is None else seen & (segments[:, now, None] == segments[:, None, : now.stop])
    return seen.expand(len(x_BT), -1, -1)


def _chosen(scores_BQS: Tensor, seen_BQS: Tensor, top: int, T: int) -> Tensor:
    return F.pad(best(scores_BQS, seen_BQS, top), (0, T - scores_BQS.shape[-1]))
