"""Pre-norm blocks with SwiGLU: the delta rules' (8/3 wide), the Forgetting Transformer's (7/3), Based's (2 wide)."""

from dataclasses import replace

from basecap.mixers import LayerSpec
from basecap.models.backbones._contract import Backbone, backbone
from basecap.models.feed_forward import FeedForward, gated_inner, narrow_inner


def _swiglu(layer: LayerSpec) -> FeedForward:
    return FeedForward("swiglu", layer, gated_inner(layer.hidden), scheme="plain")


def _swiglu_of_7_thirds(layer: LayerSpec) -> FeedForward:
    return FeedForward("swiglu", layer, narrow_inner(layer.hidden), scheme="plain")


def _half_swiglu(layer: LayerSpec) -> FeedForward:
    return FeedForward("swiglu", layer, gated_inner(layer.hidden) // 2, scheme="plain")


def _narrow_swiglu(layer: LayerSpec) -> FeedForward:
    return FeedForward("swiglu", layer, 2 * layer.hidden)


@backbone("swiglu")
def swiglu() -> Backbone:
    """RMSNorm, mixer, RMSNorm, SwiGLU; untied."""
    return Backbone(
        summary="RMSNorm before mixer and SwiGLU; untied",
        paper="arXiv 2002.05202 (SwiGLU), arXiv 2406.06484 (DeltaNet)",
        feed_forward=_swiglu,
        tied=False,
        differences=(
            "The inner width of SwiGLU is rounded up to a multiple of 64, so that it is that of transformer++; fla "
            "rounds to 256: 5,632 and not 5,504 at width 2048, 1,536 and not 1,408 at 512, the same at 768.",
            "Gains of norms do not decay, as in every architecture of a study; flame, the trainer for fla's models, "
            "decays all parameters alike.",
        ),
    )


@backbone("swiglu narrow")
def swiglu_narrow() -> Backbone:
    """The same with a SwiGLU of 7/3 the width instead of 8/3."""
    return replace(
        swiglu(),
        summary="RMSNorm before mixer and SwiGLU of width 7/3, which leaves a matrix to the mixer; untied",
        paper="arXiv 2002.05202 (SwiGLU), arXiv 2503.02130 (FoX Pro)",
        feed_forward=_swiglu_of_7_thirds,
    )


@backbone("swiglu half")
def swiglu_half() -> Backbone:
    """The same with a SwiGLU of half the width, for mixers that are twice as large."""
    return replace(
        swiglu(),
        summary="RMSNorm before mixer and SwiGLU of width 4/3; untied",
        paper="arXiv 2002.05202 (SwiGLU), arXiv 2307.08621 (RetNet)",
        feed_forward=_half_swiglu,
    )


@backbone("based")
def based() -> Backbone:
    """RMSNorm, mixer, RMSNorm, SwiGLU of twice the width; five blocks for four Transformer layers."""
    return Backbone(
        summary="RMSNorm before mixer and SwiGLU of width 2, five blocks for four Transformer layers",
        paper="arXiv 2402.18668 (Based)",
        feed_forward=_narrow_swiglu,
        eps=1e-5,
        embedding_decay=False,
        differences=(
            "Gains of norms do not decay, as in every architecture of a study; the official trainer excepts LayerNorm "
            "alone and so decays those of RMSNorm.",
        ),
        depth_factor=1.25,
    )
