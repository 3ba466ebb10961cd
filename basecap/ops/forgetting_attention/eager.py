"""Attention with forget gates in plain PyTorch: blocks of queries, each with the keys that the gates leave open."""

import math

import torch
from torch import Tensor

from basecap.ops._dispatch import EAGER, without_autocast
from basecap.ops._saved import repeated, transformed
from basecap.ops._sums import exact_dtype, running_sums

RUNS, BACKEND = EAGER, "eager"

#: Queries of one block.
QUERIES = 128


def supports(q_BTHK: Tensor, v_BTHV: Tensor) -> None:
    """Return None: this runs everywhere."""


def attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    scale: float,
    segments: Tensor | None,
    *,
    skip: bool = True,
) -> Tensor:
    """Return [B, T, H, V]; memory O(T) besides the inputs.

    On a CPU keys before those that some head leaves open are skipped, unless `skip` is False. Elsewhere, in compiled
    code and under transforms of torch.func, a block of queries reads all keys before it: which are open is not known
    without a synchronisation.
    """
    dtype, T = q_BTHK.dtype, q_BTHK.shape[1]
    with without_autocast(q_BTHK.device):
        q, k, v = (x.transpose(1, 2).to(torch.promote_types(dtype, torch.float32)) for x in (q_BTHK, k_BTHK, v_BTHV))
        total = totals(log_decay_BTH)
        looked_at = skip and q.device.type == "cpu" and not (torch.compiler.is_compiling() or transformed())
        starts = first_open_keys(q, k, total, scale) if looked_at else [0] * -(-T // QUERIES)
        parts = []
        for start, first in zip(starts, range(0, T, QUERIES), strict=True):
            end = min(first + QUERIES, T)
            ids = None if segments is None else (segments[:, first:end], segments[:, start:end])
            given = (q[:, :, first:end], k[:, :, start:end], v[:, :, start:end], total[:, :, start:end], scale, ids)
            parts.append(repeated(_block, *given))
    return torch.cat(parts, dim=2).transpose(1, 2).to(dtype)


def totals(log_decay_BTH: Tensor) -> Tensor:
    """Return the logarithms summed from the start [B, H, T]: in float64, because weights are of differences."""
    return running_sums(log_decay_BTH.to(exact_dtype(log_decay_BTH.device)), 1).transpose(1, 2)


def closing(q_BHTK: Tensor, k_BHTK: Tensor, scale: float) -> Tensor:
    """Return [B, H], how much decay closes a key: below it all weights of keys so far together are below rounding.

    A score is at most u = scale * max |q| * max |k|, and that of a query's own key at least -u. T keys whose decay is
    at least 2 u + log T - log(eps) have less than eps of the weight of the own key.
    """
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    sizes = [torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax(-1) for x in (q_BHTK, k_BHTK)]
    return 2 * scale * sizes[0] * sizes[1] + math.log(2 * q_BHTK.shape[2] / torch.finfo(wide).eps)


@torch.no_grad()
def first_open_keys(q_BHTK: Tensor, k_BHTK: Tensor, total_BHT: Tensor, scale: float) -> list[int]:
    """Return for each block of queries the first key that its first query has not closed in every row and head."""
    if q_BHTK.shape[2] <= QUERIES:
        return [0]
    decay_BHMT = total_BHT[..., None, :] - total_BHT[..., ::QUERIES, None]
    closed = decay_BHMT > closing(q_BHTK, k_BHTK, scale)[..., None, None]
    return closed.all(0).all(0).sum(-1).tolist()


def _block(
    q_BHQK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    total_BHS: Tensor,
    scale: float,
    segments: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return [B, H, Q, V]; the queries are those of the last Q of S tokens."""
    Q, S = q_BHQK.shape[2], k_BHSK.shape[2]
    s = torch.arange(S, device=q_BHQK.device)
    seen = s[S - Q :, None] >= s
    if segments is not None:
        seen = seen & (segments[0][:, None, :, None] == segments[1][:, None, None, :])
    decay_BHQS = (total_BHS[..., S - Q :, None] - total_BHS[..., None, :]).to(q_BHQK.dtype)
    scores_BHQS = (q_BHQK * scale) @ k_BHSK.mT + decay_BHQS
    return scores_BHQS.masked_fill(~seen, float("-inf")).softmax(-1) @ v_BHSV
