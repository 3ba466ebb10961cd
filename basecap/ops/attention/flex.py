"""Windows, ALiBi and segments on PyTorch's FlexAttention, which has fused kernels on a GPU."""

from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def supports(q_BTHK: Tensor, v_BTGV: Tensor) -> str | None:
    """Return why FlexAttention cannot run here, or None."""
    if not q_BTHK.is_cuda:
        return "FlexAttention has no backward off the GPU"
    if q_BTHK.dtype == torch.float64:
        return "FlexAttention has no float64"
    if q_BTHK.shape[3] < 16 or v_BTGV.shape[3] < 16:
        return "FlexAttention needs head sizes of at least 16"
    return None


@cache
def _compiled():
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=16)
def _band(length: int, window: int | None, device: torch.device) -> BlockMask:
    def visible(batch, head, t, s):
        band = t >= s
        return band if window is None else band & (t - s < window)

    return create_block_mask(visible, None, None, length, length, device=str(device))


def _packed(segments: Tensor, window: int | None) -> BlockMask:
    def visible(batch, head, t, s):
        band = (t >= s) & (segments[batch, t] == segments[batch, s])
        return band if window is None else band & (t - s < window)

    B, T = segments.shape
    return create_block_mask(visible, B, None, T, T, device=str(segments.device))


def attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    scale: float,
    window: int | None,
    slopes: Tensor | None,
    segments: Tensor | None,
) -> Tensor:
    """Return [B, T, H, V]; memory O(T)."""
    mask = _band(q_BTHK.shape[1], window, q_BTHK.device) if segments is None else _packed(segments, window)

    def with_slope(score, batch, head, t, s):
        return score - slopes[head] * (t - s)

    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGV))
    kernel = flex_attention if torch.compiler.is_compiling() else _compiled()
    o_BHTV = kernel(
        q,
        k,
        v,
        score_mod=None if slopes is None else with_slope,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return o_BHTV.transpose(1, 2)
