"""Mamba-1 in the layout of transformers (`state-spaces/mamba-130m-hf` and its like)."""

from collections.abc import Iterator

from torch import Tensor

from basecap.families._contract import Family, ModelFile, WeightRow, ends, family, same
from basecap.models import LayerConfig, ModelConfig, model_config

#: Ours to theirs, in both generations.
STATE_SPACE = {
    "conv.bias": "conv1d.bias",
    **{name: name for name in ("in_proj.weight", "out_proj.weight", "A_log", "D")},
}


def taps(weight: Tensor) -> Tensor:
    """[D, 1, W] -> [D, W]: a depthwise convolution."""
    return weight[:, 0]


def state_space_rows(model: ModelConfig, names: dict[str, str]) -> Iterator[WeightRow]:
    """Yield the rows of blocks that are a norm and a mixer with these parameters, ours to theirs."""
    yield from ends(model, "backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight")
    for index in range(model.depth):
        block, layer = f"blocks.{index}", f"backbone.layers.{index}"
        yield same(f"{block}.mixer_norm.weight", f"{layer}.norm.weight")
        yield WeightRow(f"{block}.mixer.conv.weight", (f"{layer}.mixer.conv1d.weight",), taps)
        for ours, theirs in names.items():
            yield same(f"{block}.mixer.{ours}", f"{layer}.mixer.{theirs}")


def state_space_model(published: ModelFile, use: str, options: dict[str, int], tied: bool) -> ModelConfig:
    """Return a model of Mamba blocks; `tied` is what a configuration that does not say it means."""
    published.require({"use_bias": False, "use_conv_bias": True, "hidden_act": "silu"})
    options |= {
        "state": published.whole("state_size"),
        "expand": published.whole("expand", 2),
        "conv_width": published.whole("conv_kernel", 4),
    }
    model = model_config(
        use,
        hidden=published.whole("hidden_size"),
        vocab=published.whole("vocab_size"),
        pattern=(LayerConfig(use=use, mixer=options),),
        layers=published.whole("num_hidden_layers"),
        tied=bool(published.values.get("tie_word_embeddings", tied)),
    )
    depth = {"depth": published.whole("num_hidden_layers"), "eps": published.number("layer_norm_epsilon", 1e-5)}
    return model.model_copy(update=depth)


@family("mamba")
class MambaOne(Family):
    """Mamba-1."""

    def model(self, published: ModelFile) -> ModelConfig:
        """Return mamba-1 of any size."""
        hidden, rank = published.whole("hidden_size"), published.values.get("time_step_rank", "auto")
        options = {"dt_rank": -(-hidden // 16) if rank == "auto" else published.whole("time_step_rank")}
        return state_space_model(published, "mamba-1", options, tied=True)

    def rows(self, model: ModelConfig) -> Iterator[WeightRow]:
        """Yield the rows of embedding, blocks, norm and head."""
        own = {name: name for name in ("x_proj.weight", "dt_proj.weight", "dt_proj.bias")}
        return state_space_rows(model, STATE_SPACE | own)
