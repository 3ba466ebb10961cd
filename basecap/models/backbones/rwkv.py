"""RWKV's blocks: LayerNorm before time mixing and channel mixing, LayerNorm after the embedding; untied."""

from functools import partial
from typing import Literal

from basecap.mixers import LayerSpec, scaled_orthogonal, uniform
from basecap.models._channel_mix import ChannelMix
from basecap.models.backbones._contract import Backbone, backbone


def _channel_mix(generation: Literal[4, 5, 6, 7], width: float, layer: LayerSpec) -> ChannelMix:
    return ChannelMix(generation, layer, max(32, int(width * layer.hidden) // 32 * 32))


def _family(generation: Literal[4, 5, 6, 7], width: float, depths: dict[int, int] | None = None) -> Backbone:
    return Backbone(
        summary=f"LayerNorm before mixer and rwkv-{generation}'s channel mixing of width {width:g}",
        paper="BlinkDL/RWKV-LM; arXiv 2305.13048, 2404.05892, 2503.14456",
        norm="layer",
        eps=1e-5,
        feed_forward=partial(_channel_mix, generation, width),
        embedding_norm=True,
        tied=False,
        embedding=uniform(-1e-4, 1e-4),
        head=scaled_orthogonal(0.5),
        depths=depths or {768: 12, 2048: 24},
        differences=(
            "With `tied: true`, which the official code does not have, the one matrix starts as the embedding, uniform "
            "in ±1e-4, and not as the head: started as an orthogonal head, RWKV-5 and RWKV-6 learned more slowly, by "
            "0.06 nats per token after 60M tokens (results/limited-zoo).",
            "The official trainers add L2Wrap, a pull of the largest logit towards 0, to the loss, and their Adam has "
            "beta2 0.99 and epsilon 1e-18; all architectures of a study share one loss and one Adam.",
        ),
    )


@backbone("rwkv-4")
def rwkv_4() -> Backbone:
    """RWKV-4 with channel mixing of twice the width, as in the second paper's 153M model."""
    return _family(4, 2.0, {1024: 12, 2048: 24})


@backbone("rwkv-5")
def rwkv_5() -> Backbone:
    """RWKV-5."""
    return _family(5, 3.5)


@backbone("rwkv-6")
def rwkv_6() -> Backbone:
    """RWKV-6."""
    return _family(6, 3.5)


@backbone("rwkv-7")
def rwkv_7() -> Backbone:
    """RWKV-7."""
    return _family(7, 4.0)
