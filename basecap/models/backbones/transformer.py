"""Pre-norm Transformer blocks: RMSNorm and GeGLU (transformer++), GPT-2, GPT-NeoX."""

from dataclasses import replace
from functools import partial

from basecap.mixers import LayerSpec, Scheme, small_normal
from basecap.models.backbones._contract import Backbone, backbone
from basecap.models.feed_forward import FeedForward, gated_inner, narrow_inner


def _geglu(layer: LayerSpec) -> FeedForward:
    return FeedForward("geglu", layer, gated_inner(layer.hidden))


def _narrow_geglu(layer: LayerSpec) -> FeedForward:
    return FeedForward("geglu", layer, narrow_inner(layer.hidden))


def _gelu(scheme: Scheme, layer: LayerSpec) -> FeedForward:
    return FeedForward("gelu", layer, 4 * layer.hidden, bias=True, scheme=scheme)


#: Of the feed-forward layers of GPT-2 and GPT-NeoX.
_EXACT_GELU = "GELU is exact; the official code has its approximation by tanh, which differs by less than 0.001."


@backbone("transformer++")
def transformer_plus_plus() -> Backbone:
    """RMSNorm, mixer, RMSNorm, GeGLU."""
    return Backbone(
        summary="RMSNorm before mixer and GeGLU",
        paper="arXiv 1910.07467 (RMSNorm), arXiv 2002.05202 (GeGLU)",
        feed_forward=_geglu,
    )


@backbone("transformer++ absolute")
def transformer_plus_plus_absolute() -> Backbone:
    """The same with learned absolute positions."""
    return replace(
        transformer_plus_plus(),
        summary="RMSNorm before mixer and GeGLU, learned absolute positions",
        positions="learned",
    )


@backbone("transformer++ narrow")
def transformer_plus_plus_narrow() -> Backbone:
    """The same with a GeGLU of 7/3 the width instead of 8/3."""
    return replace(
        transformer_plus_plus(),
        summary="RMSNorm before mixer and GeGLU of width 7/3, which leaves a matrix of the width for the mixer",
        feed_forward=_narrow_geglu,
    )


@backbone("gpt")
def gpt() -> Backbone:
    """LayerNorm, mixer, LayerNorm, GELU; learned absolute positions."""
    return Backbone(
        summary="LayerNorm before mixer and GELU layer, learned absolute positions (GPT-2)",
        paper="Radford et al. 2019, GPT-2",
        norm="layer",
        eps=1e-5,
        feed_forward=partial(_gelu, "gpt-2"),
        positions="learned",
        differences=(_EXACT_GELU,),
    )


@backbone("gpt-neox")
def gpt_neox() -> Backbone:
    """LayerNorm, then mixer and GELU in parallel; untied."""
    return Backbone(
        summary="mixer and GELU layer in parallel, each behind its LayerNorm; untied (GPT-NeoX, Pythia)",
        paper="arXiv 2204.06745 (GPT-NeoX-20B), arXiv 2304.01373 (Pythia)",
        norm="layer",
        eps=1e-5,
        feed_forward=partial(_gelu, "gpt-neox"),
        parallel=True,
        tied=False,
        embedding=small_normal(),
        head=small_normal(),
        differences=(_EXACT_GELU,),
        depths={768: 8, 2048: 24},
    )
