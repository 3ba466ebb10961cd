"""RWKV's blocks: LayerNorm before time mixing and channel mixing, LayerNorm after the embedding."""

import math
from functools import partial
from typing import Any

from torch import Tensor

from basecap.mixers._contract import LayerSpec
from basecap.mixers._recipes import orthogonal, uniform
from basecap.models._channel_mix import ChannelMix
from basecap.models.backbones._contract import Backbone, backbone


def _channel_mix(kind: str, width: float, layer: LayerSpec) -> ChannelMix:
    inner = max(32, int(width * layer.hidden) // 32 * 32)
    return ChannelMix(kind, layer.hidden, inner, layer.index, layer.depth)


def _orthogonal_head(parameter: Tensor, generator: Any) -> None:
    rows, columns = parameter.shape
    orthogonal(0.5 * math.sqrt(max(1.0, rows / columns)))(parameter, generator)


def _family(kind: str, width: float, *, tied: bool, depths: dict[int, int] | None = None) -> Backbone:
    # A tied matrix starts as an embedding, too: begun as an orthogonal head, RWKV-5 and 6 had lost 0.06 nats per token
    # after 50M tokens (results/limited-zoo-tied-heads).
    feed_forward = partial(_channel_mix, kind, width)
    return Backbone(
        summary=f"LayerNorm before mixer and {kind}'s channel mixing of width {width:g}",
        paper="BlinkDL/RWKV-LM; arXiv 2305.13048, 2404.05892, 2503.14456",
        norm="layer",
        eps=1e-5,
        feed_forward=feed_forward,
        embedding_norm=True,
        tied=tied,
        embedding=uniform(-1e-4, 1e-4),
        head=_orthogonal_head,
        depths=depths or {768: 12, 2048: 24},
    )


@backbone("rwkv-4")
def rwkv_4() -> Backbone:
    """RWKV-4 with channel mixing of twice the width, as in the second paper's 153M model."""
    return _family("rwkv-4", 2.0, tied=True, depths={1024: 12, 2048: 24})


@backbone("rwkv-5")
def rwkv_5() -> Backbone:
    """RWKV-5."""
    return _family("rwkv-5", 3.5, tied=True)


@backbone("rwkv-6")
def rwkv_6() -> Backbone:
    """RWKV-6."""
    return _family("rwkv-6", 3.5, tied=True)


@backbone("rwkv-7")
def rwkv_7() -> Backbone:
    """RWKV-7; untied, as its authors publish it."""
    return _family("rwkv-7", 4.0, tied=False)
