"""The blocks of xLSTM 7B (arXiv 2503.13427): RMSNorm before the mixer and before a SwiGLU."""

from basecap.mixers import LayerSpec, small_normal
from basecap.models.backbones._contract import Backbone, backbone
from basecap.models.feed_forward import FeedForward, gated_inner


def _swiglu(layer: LayerSpec) -> FeedForward:
    return FeedForward("swiglu", layer, gated_inner(layer.hidden), scheme="gpt-neox")


@backbone("xlstm")
def xlstm() -> Backbone:
    """RMSNorm, mixer, RMSNorm, SwiGLU, with the initialisation of GPT-NeoX; untied."""
    return Backbone(
        summary="RMSNorm before mixer and SwiGLU, initialised as GPT-NeoX; untied",
        paper="arXiv 2503.13427 (xLSTM 7B)",
        feed_forward=_swiglu,
        tied=False,
        embedding=small_normal(),
        head=small_normal(),
        embedding_decay=False,
        differences=(
            "The inner width of SwiGLU is that of transformer++, 2,048 at width 768; the official factor 2.667 rounds "
            "up to 2,112.",
            "Logits are not bounded, like those of every architecture here; the official model takes "
            "30 tanh(logits / 30).",
        ),
    )
