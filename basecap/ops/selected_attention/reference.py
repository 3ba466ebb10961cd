"""The definition of attention to chosen blocks of keys, any dtype, T x T in memory."""

import torch
from torch import Tensor

from basecap.ops._dispatch import without_autocast
from basecap.ops._influence import of_heads, visible


def weights(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    chosen_BTCM: Tensor,
    blocks_BT: Tensor,
    scale: float,
    segments: Tensor | None = None,
    heads: slice | None = None,
) -> Tensor:
    """Return the attention distribution [B, H, T, T], or that of a slice of the query heads."""
    T, H = q_BTHK.shape[1:3]
    heads = slice(0, H) if heads is None else heads
    read_BTHS = of_heads(chosen_BTCM, heads, H).gather(
        -1, blocks_BT[:, None, None].expand(-1, T, heads.stop - heads.start, -1)
    )
    seen_BHTS = read_BTHS.transpose(1, 2) & visible(T, segments, q_BTHK.device)
    # Autocast would round the scores.
    with without_autocast(q_BTHK.device):
        scores_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK[:, :, heads], of_heads(k_BTGK, heads, H)) * scale
    return scores_BHTS.masked_fill(~seen_BHTS, float("-inf")).softmax(-1)


def attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    chosen_BTCM: Tensor,
    blocks_BT: Tensor,
    scale: float,
    segments: Tensor | None = None,
) -> Tensor:
    """Return [B, T, H, V] in the dtype of v."""
    H = q_BTHK.shape[2]
    factors_BHTS = weights(q_BTHK, k_BTGK, chosen_BTCM, blocks_BT, scale, segments)
    return torch.einsum("bhts,bshv->bthv", factors_BHTS.to(v_BTGV.dtype), of_heads(v_BTGV, slice(0, H), H))
