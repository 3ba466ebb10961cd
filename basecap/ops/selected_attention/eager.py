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
    parts = []
    for end in range(QUERIES, T + QUERIES, QUERIES):
        now, past = slice(end - QUERIES, min(end, T)), slice(0, min(end, T))
        ids = None if segments is None else (segments[:, now], segments[:, past])
        keys = k_BTGK[:, past], v_BTGV[:, past], chosen_BTCM[:, now], blocks_BT[:, past]
        parts.append(repeated(_attend, q_BTHK[:, now], *keys, scale, ids))
    return torch.cat(parts, dim=2).transpose(1, 2)


def _attend(
    q_BQHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    chosen_BQCM: Tensor,
    blocks_BS: Tensor,
    scale: float,
    segments: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return [B, H, Q, V]; the queries are those of the last Q of S tokens."""
    (_, Q, H, _), S = q_BQHK.shape, k_BSGK.shape[1]
    s = torch.arange(S, device=q_BQHK.device)
    seen = s[S - Q :, None] >= s
    if segments is not None:
        seen = seen & (segments[0][:, None, :, None] == segments[1][:, None, None, :])
    read = chosen_BQCM.gather(-1, blocks_BS[:, None, None].expand(-1, Q, chosen_BQCM.shape[2], -1)).transpose(1, 2)
    mask_BHQS = (read & seen).repeat_interleave(H // read.shape[1], dim=1)
    q, k, v = (x.transpose(1, 2) for x in (q_BQHK, k_BSGK, v_BSGV))
    grouped = differ(H, k_BSGK.shape[2])
    return F.scaled_dot_product_attention(q, k, v, mask_BHQS, scale=scale, enable_gqa=grouped)
