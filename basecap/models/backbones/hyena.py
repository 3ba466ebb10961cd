"""Hyena's block: LayerNorm before the operator and a GELU layer of twice the width."""

from basecap.mixers import LayerSpec
from basecap.models.backbones._contract import Backbone, backbone
from basecap.models.feed_forward import FeedForward


def _gelu(layer: LayerSpec) -> FeedForward:
    return FeedForward("gelu", layer, 2 * layer.hidden, bias=True)


@backbone("hyena")
def hyena() -> Backbone:
    """LayerNorm, mixer, LayerNorm, GELU of width 2; one and a half blocks per Transformer layer."""
    return Backbone(
        summary="LayerNorm before mixer and GELU layer of width 2, three blocks for two Transformer layers",
        paper="arXiv 2302.10866 (Hyena), the 153M configuration",
        norm="layer",
        eps=1e-5,
        feed_forward=_gelu,
        differences=(
            "There is no dropout; the official configuration drops 10 % of the embeddings.",
            "Biases, gains of norms and the skip of the filter do not decay, as in every architecture of a study; the "
            "official trainer decays all but the filter's network.",
            "GELU is exact; the official code has its approximation by tanh, which differs by less than 0.001.",
        ),
        depth_factor=1.5,
    )
