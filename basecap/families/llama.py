"""Llama, Mistral and what has their layout in transformers: RMSNorm, RoPE, grouped keys, SwiGLU."""

from collections.abc import Iterator

from basecap.families._contract import Family, ModelFile, WeightRow, ends, family, joined, same
from basecap.models import LayerConfig, ModelConfig, model_config

#: Our names of SwiGLU to theirs.
SWIGLU = {
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


@family("llama", "mistral")
class Llama(Family):
    """Softmax attention with RoPE in RMSNorm and SwiGLU blocks."""

    ignored = ("rotary_emb.inv_freq",)

    def model(self, published: ModelFile) -> ModelConfig:
        """Return transformer++ in the backbone swiglu, with the published widths."""
        published.require({"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
        hidden, heads = published.whole("hidden_size"), published.whole("num_attention_heads")
        base, _ = published.rotary()
        options = {"heads": heads, "kv_heads": published.whole("num_key_value_heads", heads), "rope_base": base}
        if published.values.get("head_dim") is not None:
            options["head_dim"] = published.whole("head_dim")
        if published.values.get("sliding_window") is not None:
            options["window"] = published.whole("sliding_window")
        model = model_config(
            "transformer++",
            hidden=hidden,
            vocab=published.whole("vocab_size"),
            layers=published.whole("num_hidden_layers"),
            pattern=(LayerConfig(use="transformer++", mixer=options),),
            backbone="swiglu",
            tied=bool(published.values.get("tie_word_embeddings", False)),
            max_length=published.whole("max_position_embeddings", 2048),
        )
        inner, eps = published.whole("intermediate_size"), published.number("rms_norm_eps", 1e-6)
        return model.model_copy(update={"inner": inner, "eps": eps})

    def rows(self, model: ModelConfig) -> Iterator[WeightRow]:
        """Yield the rows of embedding, blocks, norm and head."""
        yield from ends(model, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        names = {
            "mixer_norm": "input_layernorm",
            "feed_forward_norm": "post_attention_layernorm",
            "mixer.out": "self_attn.o_proj",
        }
        for index in range(model.depth):
            block, layer = f"blocks.{index}", f"model.layers.{index}"
            parts = [f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
            yield joined(f"{block}.mixer.project.qkv.weight", *parts)
            for name, other in (names | SWIGLU).items():
                yield same(f"{block}.{name}.weight", f"{layer}.{other}.weight")
