"""Causal softmax attention to the blocks of keys that each query has chosen, of any sizes down to one token."""

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import choose, families
from basecap.ops._influence import Influence, wide
from basecap.ops._selection.checks import check_heads
from basecap.ops._shapes import check_devices, check_integers, check_scale, check_segments
from basecap.ops.selected_attention import eager, flex_kernels, reference

__all__ = ["influence", "selected_attention"]

#: The fastest first.
FAMILIES = families(flex_kernels, eager)


def selected_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    chosen_BTCM: Tensor,
    blocks_BT: Tensor,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Attend: o_t = sum_s softmax_s(scale * q_t.k_s) v_s over the s <= t of t's segment whose block t has chosen.

    The choice has no gradient. The result for a query none of whose visible keys is chosen is undefined.

    Args:
        q_BTHK: queries, H a multiple of G.
        k_BTGK: keys.
        v_BTGK: values.
        chosen_BTCM: bool, whether a query reads a block; C divides H, and as many heads in a row share a choice.
        blocks_BT: int64, the block of each key, from 0 to M - 1. Segments may have blocks of the same numbers.
        scale: positive factor of the scores; 1/sqrt(K) when None.
        segments: int64 [B, T], see `Mixer.forward`.

    Returns:
        [B, T, H, K] in the dtype of q.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an invalid scale.
    """
    scale = _check(q_BTHK, k_BTGK, v_BTGK, chosen_BTCM, blocks_BT, scale, segments)
    run = FAMILIES[choose("selected_attention", "auto", FAMILIES, q_BTHK, v_BTGK)]
    o_BTHK: Tensor = run.attention(q_BTHK, k_BTGK, v_BTGK, chosen_BTCM, blocks_BT, scale, segments)
    return o_BTHK


def influence(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    chosen_BTCM: Tensor,
    blocks_BT: Tensor,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
) -> Influence:
    """Return the attention distribution of every query head, zero outside the chosen blocks.

    The arguments are those of `selected_attention`, except the values; raises ConfigError as it does.
    """
    scale = _check(q_BTHK, k_BTGK, k_BTGK, chosen_BTCM, blocks_BT, scale, segments)
    (q, k), (B, T, H, _) = wide(q_BTHK, k_BTGK), q_BTHK.shape

    def factors(heads: slice) -> Tensor:
        return reference.weights(q, k, chosen_BTCM, blocks_BT, scale, segments, heads)

    return Influence(shape=(B, H, T), device=q.device, factors=factors)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    blocks: Tensor,
    scale: float | None,
    segments: Tensor | None,
) -> float:
    """Return the scale; raises ConfigError for what does not fit."""
    check_heads({"q": q, "k": k, "v": v})
    B, T, H, K = q.shape
    check_integers("chosen", chosen)
    if chosen.dtype != torch.bool or chosen.dim() != 4 or chosen.shape[:2] != (B, T) or 0 in chosen.shape[2:]:
        raise ConfigError(
            f"chosen {list(chosen.shape)}, {chosen.dtype}, must be bool [B, T, C, M] with B, T = {[B, T]}."
        )
    if H % chosen.shape[2]:
        raise ConfigError(f"q has {H} heads, which is not a multiple of the {chosen.shape[2]} choices of each token.")
    if blocks.shape != (B, T) or blocks.dtype != torch.int64:
        raise ConfigError(f"blocks {list(blocks.shape)}, {blocks.dtype}, must be int64 [B, T] = {[B, T]}.")
    check_segments(segments, (B, T))
    check_devices({"q": q, "chosen": chosen, "blocks": blocks, "segments": segments})
    return check_scale(scale, K)
