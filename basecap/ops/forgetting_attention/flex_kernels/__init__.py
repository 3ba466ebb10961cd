"""Attention with forget gates on PyTorch's FlexAttention, which has fused kernels on a GPU."""

import torch
from torch import Tensor

from basecap.ops.attention import flex_kernels
from basecap.ops.attention.flex_kernels import BLOCK, block_mask
from basecap.ops.forgetting_attention.eager import closing, totals

RUNS, BACKEND = "FlexAttention", None

#: Its kernels add the gradients of what a score reads beside queries and keys, here the decays, atomically.
REPEATS = False


def supports(q_BTHK: Tensor, v_BTHV: Tensor) -> str | None:
    """Return why FlexAttention does not run here, or None."""
    return flex_kernels.supports(q_BTHK, v_BTHV, False, False)


def attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    scale: float,
    segments: Tensor | None,
) -> Tensor:
    """Return [B, T, H, V]; memory O(T). Tiles of keys that the gates have closed are never touched."""
    B, T = q_BTHK.shape[:2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHV))
    total_BHT = totals(log_decay_BTH)
    with torch.no_grad():
        # From the first query of each tile to the last key of each.
        apart = total_BHT[..., None, BLOCK - 1 :: BLOCK] - total_BHT[..., ::BLOCK, None]
        mask = block_mask(B, T, None, segments, q.device, apart <= closing(q, k, scale)[..., None, None])
    # In two parts, for the kernels have no float64. A softmax does not change with what all scores of a query have in
    # common, so only the sums at keys have a gradient; the kernels take one tensor with a gradient once.
    learned = total_BHT.float()
    high = learned.detach()
    low = (total_BHT.detach() - high).float()

    def decayed(score, b, h, t, s):
        return score + (high[b, h, t] - learned[b, h, s]) + (low[b, h, t] - low[b, h, s])

    o_BHTV = flex_kernels.kernel()(q, k, v, score_mod=decayed, block_mask=mask, scale=scale)
    return o_BHTV.transpose(1, 2)
