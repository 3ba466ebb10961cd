"""GPT-NeoX and Pythia in the layout of transformers (`EleutherAI/pythia-160m` and its like)."""

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from basecap.families._contract import Family, ModelFile, WeightRow, ends, family, same
from basecap.models import LayerConfig, ModelConfig, model_config


@family("gpt_neox")
class GPTNeoX(Family):
    """GPT-NeoX, with mixer and feed-forward layer in parallel."""

    ignored = ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")
    renamed: ClassVar = {"lm_head.weight": "embed_out.weight"}  # as transformers 5 writes it

    def model(self, published: ModelFile) -> ModelConfig:
        """Return pythia of any size."""
        published.require({"hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True})
        base, share = published.rotary(0.25)
        options = {"heads": published.whole("num_attention_heads"), "rope_base": base, "rotary_fraction": share}
        model = model_config(
            "pythia",
            hidden=published.whole("hidden_size"),
            vocab=published.whole("vocab_size"),
            layers=published.whole("num_hidden_layers"),
            pattern=(LayerConfig(use="pythia", mixer=options),),
            tied=bool(published.values.get("tie_word_embeddings", False)),
            max_length=published.whole("max_position_embeddings", 2048),
        )
        inner, eps = published.whole("intermediate_size"), published.number("layer_norm_eps", 1e-5)
        return model.model_copy(update={"inner": inner, "eps": eps})

    def rows(self, model: ModelConfig) -> Iterator[WeightRow]:
        """Yield the rows of embedding, blocks, norm and head."""
        heads = model.layers[0].mixer["heads"]

        def parted(weight: Tensor) -> Tensor:
            """[heads x 3 x ...] -> [3 x heads x ...]: query, key and value of a head lie together there."""
            return weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)

        yield from ends(model, "gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.weight", "embed_out.weight")
        yield same("norm.bias", "gpt_neox.final_layer_norm.bias")
        names = {
            "mixer_norm": "input_layernorm",
            "feed_forward_norm": "post_attention_layernorm",
            "mixer.out": "attention.dense",
            "feed_forward.up": "mlp.dense_h_to_4h",
            "feed_forward.down": "mlp.dense_4h_to_h",
        }
        for index in range(model.depth):
            block, layer = f"blocks.{index}", f"gpt_neox.layers.{index}"
            for part in ("weight", "bias"):
                theirs = f"{layer}.attention.query_key_value.{part}"
                yield WeightRow(f"{block}.mixer.project.qkv.{part}", (theirs,), parted)
                for name, other in names.items():
                    yield same(f"{block}.{name}.{part}", f"{layer}.{other}.{part}")
