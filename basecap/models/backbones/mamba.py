"""Mamba's block: a norm and a mixer, twice as many as a Transformer has layers."""

from basecap.models.backbones._contract import Backbone, backbone


@backbone("mamba")
def mamba() -> Backbone:
    """RMSNorm and mixer alone."""
    return Backbone(
        summary="RMSNorm and mixer without feed-forward layer, two blocks per Transformer layer",
        paper="arXiv 2312.00752 (Mamba), section 3.4",
        eps=1e-5,
        depth_factor=2.0,
        differences=(
            "Mamba's authors publish no trainer: matrices, the embedding and the taps of convolutions decay; biases, "
            "gains of norms and what the code marks `_no_weight_decay` do not.",
        ),
    )
