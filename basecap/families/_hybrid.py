"""Hybrids of Qwen in the layout of transformers: Gated DeltaNet and gated attention by turns, with dense SwiGLU."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.families._contract import Family, ModelFile, WeightRow, same
from basecap.families.llama import SWIGLU
from basecap.families.mamba import taps
from basecap.models import LayerConfig, ModelConfig, model_config


class GatedHybrid(Family):
    """Gated DeltaNet and gated attention, with dense SwiGLU; subclasses say how Gated DeltaNet is stored."""

    #: What names of weights begin with.
    stem: ClassVar[str] = "model"
    other_parts: ClassVar[tuple[str, ...]] = ("mtp.",)

    @abstractmethod
    def described(self, published: ModelFile) -> ModelFile:
        """Return the part of config.json that describes the language model; raises ConfigError for experts."""

    @abstractmethod
    def linear_rows(self, kind: LayerConfig, mixer: str, layer: str) -> Iterator[WeightRow]:
        """Yield the rows of the projections of Gated DeltaNet."""

    def model(self, published: ModelFile) -> ModelConfig:
        """Return gated-deltanet and transformer++ with an output gate by turns, in the backbone swiglu."""
        published = self.described(published)
        published.require(
            {"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6, "attn_output_gate": True}
        )
        depth = published.whole("num_hidden_layers")
        kinds = published.values.get("layer_types") or _kinds(depth, published.whole("full_attention_interval", 4))
        layers = {"linear_attention": _linear(published), "full_attention": _full(published)}
        if len(kinds) != depth or not layers.keys() >= {*kinds}:
            raise ConfigError(f"this {published.kind} has other layer_types than layers; give a sound config.json.")
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
        yield same("embedding.weight", f"{self.stem}.embed_tokens.weight")
        yield WeightRow("norm.weight", (f"{self.stem}.norm.weight",), _centred)
        if not model.tied:
            yield same("head.weight", "lm_head.weight")
        for index, kind in enumerate(model.layers):
            block, layer = f"blocks.{index}", f"{self.stem}.layers.{index}"
            for ours, theirs in (("mixer_norm", "input_layernorm"), ("feed_forward_norm", "post_attention_layernorm")):
                yield WeightRow(f"{block}.{ours}.weight", (f"{layer}.{theirs}.weight",), _centred)
            for ours, theirs in SWIGLU.items():
                yield same(f"{block}.{ours}.weight", f"{layer}.{theirs}.weight")
            if "value_expand" in kind.mixer:
                yield from self.linear_rows(kind, f"{block}.mixer", f"{layer}.linear_attn")
                yield from _linear_rows(f"{block}.mixer", f"{layer}.linear_attn")
            else:
                yield from _full_rows(kind, f"{block}.mixer", f"{layer}.self_attn")


def _kinds(depth: int, interval: int) -> list[str]:
    """Return the published order: the last of every `interval` layers has attention."""
    return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(depth)]


def _linear(published: ModelFile) -> LayerConfig:
    heads, values = published.whole("linear_num_key_heads", 16), published.whole("linear_num_value_heads", 32)
    key, value = published.whole("linear_key_head_dim", 128), published.whole("linear_value_head_dim", 128)
    if values % heads or value % key:
        raise ConfigError(
            f"this {published.kind} has {heads} key heads of {key} channels and {values} value heads of {value}, and "
            "basecap's keys divide the values in number and size; import another one."
        )
    options = {"heads": values, "key_heads": heads, "head_dim": key, "value_expand": value // key}
    options["conv_width"] = published.whole("linear_conv_kernel_dim", 4)
    return LayerConfig(use="gated-deltanet", mixer=options)


def _full(published: ModelFile) -> LayerConfig:
    heads, groups = published.whole("num_attention_heads"), published.whole("num_key_value_heads", 2)
    base, share = published.rotary(0.25)
    options: dict[str, Any] = {"heads": heads, "kv_heads": groups, "head_dim": published.whole("head_dim", 256)}
    options |= {"rope_base": base, "rotary_fraction": share, "qk_norm": True, "qk_gain": True, "gate": "elementwise"}
    return LayerConfig(use="transformer++", mixer=options)


def _linear_rows(mixer: str, layer: str) -> Iterator[WeightRow]:
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
