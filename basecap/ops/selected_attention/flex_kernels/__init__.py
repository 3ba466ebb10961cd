"""Attention to chosen blocks of keys on PyTorch's FlexAttention, which has fused kernels on a GPU."""

import torch
from torch import Tensor

from basecap.ops.attention import flex_kernels
from basecap.ops.attention.flex_kernels import BLOCK, attend, block_mask, compiled
from basecap.ops.operators import operator

RUNS, BACKEND = "FlexAttention", None


def supports(q_BTHK: Tensor, v_BTGV: Tensor) -> str | None:
    """Return why FlexAttention does not run here, or None."""
    if q_BTHK.dtype == torch.float32:
        return "FlexAttention adds a key's float32 gradients in one chain, which rounds too often"
    return flex_kernels.supports(q_BTHK, v_BTGV, False, False)


# Inductor reads what a mask refers to as it was first filled, without what scatter wrote to it since. The result of a
# custom operator is read as it is.
@operator("basecap::copy_choice")
def copy_choice(chosen_BTCM: Tensor) -> Tensor:
    """Return a copy, for a mask to refer to in compiled code."""
    return chosen_BTCM.clone(memory_format=torch.contiguous_format)


@copy_choice.register_fake
def _(chosen_BTCM: Tensor) -> Tensor:
    return torch.empty_like(chosen_BTCM, memory_format=torch.contiguous_format)


def attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    chosen_BTCM: Tensor,
    blocks_BT: Tensor,
    scale: float,
    segments: Tensor | None,
) -> Tensor:
    """Return [B, T, H, V]; memory O(T). Tiles of keys that no query of a tile has chosen are never touched."""
    if torch.compiler.is_compiling():
        return _attend(q_BTHK, k_BTGK, v_BTGV, copy_choice(chosen_BTCM), blocks_BT, scale, segments)
    return compiled(_attend)(q_BTHK, k_BTGK, v_BTGV, chosen_BTCM.contiguous(), blocks_BT, scale, segments)


def _attend(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    chosen_BTCM: Tensor,
    blocks_BT: Tensor,
    scale: float,
    segments: Tensor | None,
) -> Tensor:
    """Return what `attention` returns, with the mask: compiled with it, its many small operations are few kernels."""
    B, T, H, _ = q_BTHK.shape
    each = H // chosen_BTCM.shape[2]

    def is_chosen(b, h, t, s):
        return chosen_BTCM[b, t, h // each, blocks_BT[b, s]]

    mask = block_mask(B, T, None, segments, q_BTHK.device, tiles(chosen_BTCM, blocks_BT, each), is_chosen)
    return attend(q_BTHK, k_BTGK, v_BTGV, mask, scale)


def tiles(chosen_BTCM: Tensor, blocks_BT: Tensor, each: int) -> Tensor:
    """Return bool [B, H, tiles of queries, tiles of keys]: whether some query of a tile has chosen some key."""
    some_BNCM = chosen_BTCM.unflatten(1, (-1, BLOCK)).any(2)
    keys = blocks_BT[:, None, None].expand(-1, *some_BNCM.shape[1:3], -1)
    some_BNCN = some_BNCM.gather(-1, keys).unflatten(-1, (-1, BLOCK)).any(-1)
    return some_BNCN.transpose(1, 2).repeat_interleave(each, dim=1)
