"""Qwen3-Next in the layout of transformers: Gated DeltaNet and gated attention by turns.

Dense models with as many key heads as value heads are the same in basecap. The published ones have experts, twice as
many value heads, and attention heads that are together wider than the model.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.families._contract import Family, ModelFile, WeightRow, family, same
from basecap.families.llama import SWIGLU
from basecap.families.mamba import taps
from basecap.models import LayerConfig, ModelConfig, model_config


@family("qwen3_next")
class QwenThreeNext(Family):
    """Gated DeltaNet and gated attention, with dense SwiGLU."""

    def model(self, published: ModelFile) -> ModelConfig:
        """Return gated-deltanet and transformer++ with an output gate by turns, in the backbone swiglu."""
        published.require({"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6})
        depth = published.whole("num_hidden_layers")
        if published.values.get("num_experts") != 0 and len(published.values.get("mlp_only_layers") or ()) < depth:
            raise ConfigError(
                "this qwen3_next has experts, and basecap has its gated-deltanet and gated attention with dense layers "
                "only; import another one."
            )
        kinds = published.values.get("layer_types") or _kinds(depth)
        layers = {"linear_attention": _linear(published), "full_attention": _full(published)}
        if len(kinds) != depth or not layers.keys() >= {*kinds}:
            raise ConfigError("this qwen3_next has other layer_types than layers; give a sound config.json.")
        model = model_config(
            "gated-deltanet",
            hidden=published.whole("hidden_size"),
            vocab=published.whole("vocab_size"),
            layers=depth,
            pattern=tuple(layers[kind] for kind in kinds),
            backbone="swiglu",
            tied=bool(published.values.get("tie_word_embeddings", False)),
            max_length=published.whole("max_position_embeddings", 2048),
        )
        return model.model_copy(update={"inner": published.whole("intermediate_size")})

    def rows(self, model: ModelConfig) -> Iterator[WeightRow]:
        """Yield the rows of embedding, blocks, norm and head."""
        yield same("embedding.weight", "model.embed_tokens.weight")
        yield WeightRow("norm.weight", ("model.norm.weight",), _centred)
        if not model.tied:
            yield same("head.weight", "lm_head.weight")
        for index, kind in enumerate(model.layers):
            block, layer = f"blocks.{index}", f"model.layers.{index}"
            for ours, theirs in (("mixer_norm", "input_layernorm"), ("feed_forward_norm", "post_attention_layernorm")):
                yield WeightRow(f"{block}.{ours}.weight", (f"{layer}.{theirs}.weight",), _centred)
            for ours, theirs in SWIGLU.items():
                yield same(f"{block}.{ours}.weight", f"{layer}.{theirs}.weight")
            if "value_expand" in kind.mixer:
                yield from _linear_rows(kind, f"{block}.mixer", f"{layer}.linear_attn")
            else:
                yield from _full_rows(kind, f"{block}.mixer", f"{layer}.self_attn")


def _kinds(depth: int) -> list[str]:
    """Return the published order: every fourth layer has attention."""
    return ["linear_attention" if (index + 1) % 4 else "full_attention" for index in range(depth)]


def _linear(published: ModelFile) -> LayerConfig:
    heads, values = published.whole("linear_num_key_heads", 16), published.whole("linear_num_value_heads", 32)
    key, value = published.whole("linear_key_head_dim", 128), published.whole("linear_value_head_dim", 128)
    if values != heads or value % key:
        raise ConfigError(
            f"this qwen3_next has {heads} key heads of {key} channels and {values} value heads of {value}, and "
            "basecap's have one number, and keys that divide the values; import another one."
        )
    options = {"heads": heads, "head_dim": key, "value_expand": value // key}
    options["conv_width"] = published.whole("linear_conv_kernel_dim", 4)
    return LayerConfig(use="gated-deltanet", mixer=options)


def _full(published: ModelFile) -> LayerConfig:
    heads = published.whole("num_attention_heads")
    published.require_heads(published.whole("head_dim", 256))
    base, share = published.rotary(0.25)
    options: dict[str, Any] = {"heads": heads, "kv_heads": published.whole("num_key_value_heads", 2)}
    options |= {"rope_base": base, "rotary_fraction": share, "qk_norm": True, "qk_gain": True, "gate": "elementwise"}
    return LayerConfig(use="transformer++", mixer=options)


def _linear_rows(kind: LayerConfig, mixer: str, layer: str) -> Iterator[WeightRow]:
    heads, key = kind.mixer["heads"], kind.mixer["head_dim"]
    value = key * kind.mixer["value_expand"]

    def parts(weight: Tensor) -> tuple[Tensor, ...]:
        """[heads x (query, key, value, gate) x ...] -> these four, each with all heads below each other."""
        return tuple(part.flatten(0, 1) for part in weight.unflatten(0, (heads, -1)).split([key, key, value, value], 1))

    def memory(weight: Tensor) -> Tensor:
        return torch.cat(parts(weight)[:3])

    def gate(weight: Tensor) -> Tensor:
        return parts(weight)[3]

    def strength(weight: Tensor) -> Tensor:
        """[heads x (strength, decay) x ...] -> the strengths."""
        return weight[::2]

    def decay(weight: Tensor) -> Tensor:
        return weight[1::2]

    joint, pair = (f"{layer}.in_proj_qkvz.weight",), (f"{layer}.in_proj_ba.weight",)
    yield WeightRow(f"{mixer}.memory.qkv.weight", joint, memory)
    yield WeightRow(f"{mixer}.gate.weight", joint, gate)
    yield WeightRow(f"{mixer}.memory.beta.weight", pair, strength)
    yield WeightRow(f"{mixer}.decay.weight", pair, decay)
    yield WeightRow(f"{mixer}.memory.conv.weight", (f"{layer}.conv1d.weight",), taps)
    for ours, theirs in {"norm_weight": "norm.weight", "out.weight": "out_proj.weight"}.items():
        yield same(f"{mixer}.{ours}", f"{layer}.{theirs}")
    for name in ("A_log", "dt_bias"):
        yield same(f"{mixer}.{name}", f"{layer}.{name}")


def _full_rows(kind: LayerConfig, mixer: str, layer: str) -> Iterator[WeightRow]:
    heads = kind.mixer["heads"]

    def halves(weight: Tensor) -> tuple[Tensor, Tensor]:
        """[heads x (query, gate) x ...] -> both, with all heads below each other."""
        queries, gates = weight.unflatten(0, (heads, 2, -1)).unbind(1)
        return queries.flatten(0, 1), gates.flatten(0, 1)

    def projections(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([halves(query)[0], key, value])

    def gate(query: Tensor) -> Tensor:
        return halves(query)[1]

    yield WeightRow(f"{mixer}.project.qkv.weight", tuple(f"{layer}.{part}_proj.weight" for part in "qkv"), projections)
    yield WeightRow(f"{mixer}.gate.weight", (f"{layer}.q_proj.weight",), gate)
    for part in "qk":
        yield WeightRow(f"{mixer}.project.{part}_gain", (f"{layer}.{part}_norm.weight",), _centred)
    yield same(f"{mixer}.out.weight", f"{layer}.o_proj.weight")


def _centred(weight: Tensor) -> Tensor:
    """Gains are stored as what they add to 1."""
    return 1.0 + weight
