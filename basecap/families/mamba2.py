"""Mamba-2 in the layout of transformers (`AntonV/mamba2-130m-hf` and its like)."""

from collections.abc import Iterator

from basecap.errors import ConfigError
from basecap.families._contract import Family, ModelFile, WeightRow, family
from basecap.families.mamba import STATE_SPACE, state_space_model, state_space_rows
from basecap.models import ModelConfig


@family("mamba2")
class MambaTwo(Family):
    """Mamba-2."""

    def model(self, published: ModelFile) -> ModelConfig:
        """Return mamba-2 of any size."""
        published.require({"layer_norm_epsilon": 1e-5})  # of the gated norm inside the mixer
        limits = published.values.get("time_step_limit")
        # transformers writes infinity as {"__float__": "Infinity"}
        if limits not in (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
            raise ConfigError("this mamba2 limits its step sizes, and basecap does not; import another one.")
        heads, width = published.whole("num_heads", 128), published.whole("head_dim", 64)
        inner = published.whole("expand", 2) * published.whole("hidden_size")
        if heads * width != inner:
            raise ConfigError(
                f"this mamba2 has {heads} heads of {width} channels for {inner}; give a sound config.json."
            )
        options = {"heads": heads, "groups": published.whole("n_groups", 8)}
        return state_space_model(published, "mamba-2", options, tied=False)

    def rows(self, model: ModelConfig) -> Iterator[WeightRow]:
        """Yield the rows of embedding, blocks, norm and head."""
        return state_space_rows(model, STATE_SPACE | {"dt_bias": "dt_bias", "norm_weight": "norm.weight"})
