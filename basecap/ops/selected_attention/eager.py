"""Attention to chosen blocks of keys on PyTorch's SDPA: some queries at a time, with a mask over all keys so far."""

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._saved import repeated
from basecap.ops.attention.eager import differ

RUNS, BACKEND = EAGER, "eager"

#: Queries of one product.
QUERIES = 128


def supports(q_BTHK: Tensor, v_BTGV: Tensor) -> None:
    """Return None: this runs everywhere."""


def attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    chosen_BTCM: Tensor,
    blocks_BT: Tensor,
    scale: float,
    segments: Tensor | None,
) -> Tensor:
    """Return [B, T, H, V]; memory O(T) besides the inputs, as the backward pass makes each mask again."""
    T = q_BTHK.shape[1]
    q, k, v, chosen_BCTM = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGV, chosen_BTCM))
    # What all products share is made once, as a caller in Python waits for each operation.
    read, closed = q_BTHK.new_zeros(()), q_BTHK.new_full((), float("-inf"))
    later_QT = closed.expand(min(QUERIES, T), T).triu(T - min(QUERIES, T) + 1)
    parts = []
    for end in range(QUERIES, T + QUERIES, QUERIES):
        now, past = slice(end - QUERIES, min(end, T)), slice(0, min(end, T))
        ids = None if segments is None else (segments[:, now], segments[:, past])
        keys = k[:, :, past], v[:, :, past], chosen_BCTM[:, :, now], blocks_BT[:, past]
        added = later_QT[now.start - now.stop :, T - past.stop :], read, closed
        parts.append(repeated(_attend, q[:, :, now], *keys, added, scale, ids))
    return torch.cat(parts, dim=2).transpose(1, 2)


def _attend(
    q_BHQK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    chosen_BCQM: Tensor,
    blocks_BS: Tensor,
    added: tuple[Tensor, Tensor, Tensor],
    scale: float,
    segments: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return [B, H, Q, V]; the queries are those of the last Q of S tokens.

    `added` are numbers for the scores: [Q, S] for keys behind and before each query, one for blocks that are read, and
    one for others. SDPA would make such a mask of truth values, by more operations.
    """
    (_, H, Q, _), C = q_BHQK.shape, chosen_BCQM.shape[1]
    keys_BCQS = blocks_BS[:, None, None].expand(-1, C, Q, -1)
    later_QS, read, closed = added
    mask = torch.where(chosen_BCQM, read, closed).gather(-1, keys_BCQS) + later_QS
    if segments is not None:
        mask = mask.masked_fill(segments[0][:, None, :, None] != segments[1][:, None, None], float("-inf"))
    if C != H:
        mask = mask.repeat_interleave(H // C, dim=1)
    grouped = differ(H, k_BGSK.shape[1])
    return F.scaled_dot_product_attention(q_BHQK, k_BGSK, v_BGSV, mask, scale=scale, enable_gqa=grouped)
