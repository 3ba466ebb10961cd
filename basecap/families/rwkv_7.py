"""RWKV-7 in the layout of flash-linear-attention (`fla-hub/rwkv7-168M-pile` and its like)."""

from collections.abc import Iterator

from torch import Tensor

from basecap.families._contract import Family, ModelFile, WeightRow, ends, family, same
from basecap.models import LayerConfig, ModelConfig, model_config

#: Head size at which the norm of a head's output has the epsilon of basecap, 64e-5.
HEAD = 64
#: Our low-rank maps to theirs.
LOW_RANK = {"decay": "w_lora", "rate": "a_lora", "gate": "g_lora", "first": "v_lora"}


@family("rwkv7")
class RWKVSeven(Family):
    """RWKV-7."""

    def model(self, published: ModelFile) -> ModelConfig:
        """Return rwkv-7 of any size."""
        published.require(
            {"head_dim": HEAD, "norm_first": True, "norm_bias": True, "norm_eps": 1e-5, "hidden_act": "sqrelu"}
        )
        published.require({"attn": None, "tie_word_embeddings": False})
        hidden, depth = published.whole("hidden_size"), published.whole("num_hidden_layers")
        if published.values.get("value_dim") is not None:
            published.require({"value_dim": [hidden] * depth})
        options = {
            "heads": hidden // HEAD,
            "decay_rank": published.whole("decay_low_rank_dim", 64),
            "rate_rank": published.whole("a_low_rank_dim", 64),
            "value_rank": published.whole("v_low_rank_dim", 16),
            "gate_rank": published.whole("gate_low_rank_dim", 128),
        }
        model = model_config(
            "rwkv-7",
            hidden=hidden,
            vocab=published.whole("vocab_size"),
            layers=depth,
            pattern=(LayerConfig(use="rwkv-7", mixer=options),),
            max_length=published.whole("max_position_embeddings", 2048),
        )
        inner = published.values.get("intermediate_size")
        if inner is None:
            inner = -(-int(hidden * published.number("hidden_ratio", 4)) // 32) * 32
        return model.model_copy(update={"inner": inner})

    def rows(self, model: ModelConfig) -> Iterator[WeightRow]:
        """Yield the rows of embedding and its norm, blocks, norm and head."""
        yield from ends(model, "model.embeddings.weight", "model.norm.weight", "lm_head.weight")
        yield same("norm.bias", "model.norm.bias")
        for part in ("weight", "bias"):
            yield same(f"embedding_norm.{part}", f"model.layers.0.pre_norm.{part}")
        for index in range(model.depth):
            yield from _block(index)


def _block(index: int) -> Iterator[WeightRow]:
    mixer, layer = f"blocks.{index}.mixer", f"model.layers.{index}"
    for ours, theirs in (("mixer_norm", "attn_norm"), ("feed_forward_norm", "ffn_norm"), ("mixer.norm", "attn.g_norm")):
        for part in ("weight", "bias"):
            yield same(f"blocks.{index}.{ours}.{part}", f"{layer}.{theirs}.{part}")
    for letter in "rwkvag":
        yield WeightRow(f"{mixer}.share_{letter}", (f"{layer}.attn.x_{letter}",), Tensor.flatten)
    for ours, theirs in (("removal", "k_k"), ("replacement", "k_a")):
        yield WeightRow(f"{mixer}.{ours}", (f"{layer}.attn.{theirs}",), Tensor.flatten)
    yield same(f"{mixer}.bonus", f"{layer}.attn.r_k")
    for ours, theirs in (("receptance", "r"), ("key", "k"), ("value", "v"), ("output", "o")):
        yield same(f"{mixer}.{ours}.weight", f"{layer}.attn.{theirs}_proj.weight")
    for ours, theirs in LOW_RANK.items():
        if ours == "first" and index == 0:  # it has no values of an earlier layer to mix in
            continue
        lora = f"{layer}.attn.{theirs}.lora"
        yield WeightRow(f"{mixer}.{ours}.down", (f"{lora}.0.weight",), Tensor.t)
        yield WeightRow(f"{mixer}.{ours}.up", (f"{lora}.2.weight",), Tensor.t)
        if ours != "gate":
            yield same(f"{mixer}.{ours}.base", f"{lora}.2.bias")
    yield WeightRow(f"blocks.{index}.feed_forward.share_k", (f"{layer}.ffn.x_k",), Tensor.flatten)
    for part in ("key", "value"):
        yield same(f"blocks.{index}.feed_forward.{part}.weight", f"{layer}.ffn.{part}.weight")
