"""Causal attention on PyTorch's SDPA: plain, as blocks along the window, or with a dense mask."""

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import without_autocast

RUNS, BACKEND = "PyTorch's SDPA", "eager"


#: Channels that `with_sinks` adds: kernels on a GPU take multiples of 8 only.
EXTRA = 8


def supports(q_BTHK: Tensor, v_BTGV: Tensor, plain: bool, sinks: bool) -> None:
    """Return None: this runs everywhere."""


def attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    scale: float,
    window: int | None,
    slopes: Tensor | None,
    segments: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return [B, T, H, V]; memory O(T) for plain attention, O(T * window) with a window, O(T^2) otherwise.

    With sinks a window takes O(T^2) too: blocks along it do not see the sink in front.
    """
    (T, V), ahead = (q_BTHK.shape[1], v_BTGV.shape[3]), 0
    if sinks is not None:
        q_BTHK, k_BTGK, v_BTGV = with_sinks(q_BTHK, k_BTGK, v_BTGV, scale, sinks)
        q_BTHK, ahead = F.pad(q_BTHK, (0, 0, 0, 0, 1, 0)), 1  # a query for the sink, so that the mask stays causal
    grouped = differ(q_BTHK.shape[2], k_BTGK.shape[2])
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGV))
    if window is None and slopes is None and segments is None:
        o_BHTV = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        # Without sinks no operation cuts nothing off.
        return (o_BHTV if sinks is None else o_BHTV[:, :, ahead:, :V]).transpose(1, 2)
    if window is not None and 2 * window < T and slopes is None and sinks is None:
        return _blocks(q_BTHK, k_BTGK, v_BTGV, scale, window, segments)
    t = torch.arange(T, device=q.device)
    distance = t[:, None] - t[None, :]
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None, :])[:, None]
    visible = F.pad(visible, (ahead, 0, ahead, 0), value=True)
    if slopes is None:
        o_BHTV = F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=grouped)
    else:
        slant = F.pad(-slopes[:, None, None] * distance, (ahead, 0, ahead, 0))
        o_BHTV = biased(q, k, v, slant.masked_fill(~visible, float("-inf")), scale, grouped)
    return o_BHTV[:, :, ahead:, :V].transpose(1, 2)


def with_sinks(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, scale: float, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with one more key in front: its score is the head's sink, its value is 0.

    Queries have the sink in a channel of their own, because heads may share keys. Values get as many channels as keys
    where they had as many, since only then SDPA has fast kernels.
    """
    own = F.pad((sinks_H / scale).to(q_BTHK.dtype)[:, None], (0, EXTRA - 1))
    q = torch.cat([q_BTHK, own.expand(*q_BTHK.shape[:3], EXTRA)], dim=-1)
    key = F.pad(k_BSGK.new_ones(k_BSGK.shape[0], 1, k_BSGK.shape[2], 1), (k_BSGK.shape[3], EXTRA - 1))
    k = torch.cat([key, F.pad(k_BSGK, (0, EXTRA))], dim=1)
    more = EXTRA if v_BSGV.shape[3] == k_BSGK.shape[3] else 0
    return q, k, F.pad(v_BSGV, (0, more, 0, 0, 1, 0))


def differ(heads: int, groups: int) -> bool:
    """Return whether these differ, as the bool that SDPA needs: with symbolic shapes a comparison is not a bool."""
    found = False
    if heads != groups:
        found = True
    return found


def biased(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, bias: Tensor, scale: float, grouped: bool) -> Tensor:
    """Attend with scores scale * q.k + bias, in float32 at least; return [B, H, T, V] in the dtype of q.

    SDPA takes the bias in the dtype of q; in 16 bits its error would reach a nat at distances of a few hundred tokens.
    """
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    q, k, v, bias = (x.to(wide) for x in (q_BHTK, k_BGSK, v_BGSV, bias))
    with without_autocast(q.device):
        o_BHTV = F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=grouped)
    return o_BHTV.to(q_BHTK.dtype)


def over_cache(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, mask: Tensor | None, scale: float, grouped: bool
) -> Tensor:
    """Attend from a few queries to the keys of a cache; return [B, H, T, V].

    On Hopper PyTorch 2.11 prefers cuDNN's kernels, which make a plan for each number of keys: with a cache that grows
    by a token a step, a model of 12 layers wrote 18 tokens/s instead of 85. Compiled code and CUDA graphs keep one
    number. Where heads share keys, of the fast kernels only cuDNN's take a mask.
    """
    if not q_BHTK.is_cuda or (grouped and mask is not None) or _keeps_one_length():
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSV, mask, scale=scale, enable_gqa=grouped)
    chosen, others = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(chosen and not others)  # unless the caller asks for it alone
    try:
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSV, mask, scale=scale, enable_gqa=grouped)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(chosen)


def _keeps_one_length() -> bool:
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return capturing or torch.compiler.is_compiling()


def _blocks(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scale: float, window: int, segments: Tensor | None
) -> Tensor:
    """Attend within blocks of `window` queries, each against its own and the previous block of keys."""
    B, T, H, _ = q_BTHK.shape
    blocks = -(-T // window)
    tail = blocks * window - T

    def own(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, tail)).unflatten(1, (blocks, window))

    def own_and_previous(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, window, tail)).unflatten(1, (blocks + 1, window))
        return torch.cat([x[:, :-1], x[:, 1:]], dim=2)

    q, k, v = own(q_BTHK), own_and_previous(k_BTGK), own_and_previous(v_BTGV)
    band = torch.ones(window, 2 * window, dtype=torch.bool, device=q.device).triu(1).tril(window)
    visible = band.repeat(blocks, 1, 1)
    visible[0, :, :window] = False  # nothing comes before the first block
    if segments is None:
        mask = visible.expand(B, blocks, window, 2 * window)
    else:
        own_ids = F.pad(segments, (0, tail)).unflatten(1, (blocks, window))
        ids = F.pad(segments, (window, tail)).unflatten(1, (blocks + 1, window))
        other_ids = torch.cat([ids[:, :-1], ids[:, 1:]], dim=2)
        # A padding query sees at least itself, so that no row of the softmax is empty.
        mask = visible & (own_ids[..., :, None] == other_ids[..., None, :])
    q, k, v = (x.flatten(0, 1).transpose(1, 2) for x in (q, k, v))
    grouped = differ(k_BTGK.shape[2], H)
    o = F.scaled_dot_product_attention(q, k, v, mask.flatten(0, 1)[:, None], scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2).reshape(B, blocks * window, H, v_BTGV.shape[3])[:, :T]
