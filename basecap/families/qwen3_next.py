"""Qwen3-Next in the layout of transformers. Dense models are the same in basecap; the published ones have experts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.families._contract import ModelFile, WeightRow, family
from basecap.families._hybrid import GatedHybrid
from basecap.models import LayerConfig


@family("qwen3_next")
class QwenThreeNext(GatedHybrid):
    """Gated DeltaNet, whose projections are stored key head by key head, and gated attention."""

    def described(self, published: ModelFile) -> ModelFile:
        """Return all of it; raises ConfigError for experts."""
        depth, dense = published.whole("num_hidden_layers"), published.values.get("mlp_only_layers") or ()
        if published.values.get("num_experts") != 0 and len(dense) < depth:
            raise ConfigError(
                "this qwen3_next has experts, and basecap has its gated-deltanet and gated attention with dense layers "
                "only; import another one."
            )
        return published

    def linear_rows(self, kind: LayerConfig, mixer: str, layer: str) -> Iterator[WeightRow]:
        """Yield the rows of the projections, each of which holds several of ours."""
        heads, key, values = kind.mixer["key_heads"], kind.mixer["head_dim"], kind.mixer["heads"]
        shared = values // heads  # value heads of a key head
        value = shared * key * kind.mixer["value_expand"]

        def parts(weight: Tensor) -> tuple[Tensor, ...]:
            """[key heads x (query, key, values, gates) x ...] -> these four, each with all heads below each other."""
            split = weight.unflatten(0, (heads, -1)).split([key, key, value, value], 1)
            return tuple(part.flatten(0, 1) for part in split)

        def memory(weight: Tensor) -> Tensor:
            return torch.cat(parts(weight)[:3])

        def gate(weight: Tensor) -> Tensor:
            return parts(weight)[3]

        def strength(weight: Tensor) -> Tensor:
            """[key heads x (strengths, decays) x ...] -> the strengths."""
            return weight.unflatten(0, (heads, 2, shared))[:, 0].flatten(0, 1)

        def decay(weight: Tensor) -> Tensor:
            return weight.unflatten(0, (heads, 2, shared))[:, 1].flatten(0, 1)

        joint, pair = (f"{layer}.in_proj_qkvz.weight",), (f"{layer}.in_proj_ba.weight",)
        yield WeightRow(f"{mixer}.memory.qkv.weight", joint, memory)
        yield WeightRow(f"{mixer}.gate.weight", joint, gate)
        yield WeightRow(f"{mixer}.memory.beta.weight", pair, strength)
        yield WeightRow(f"{mixer}.decay.weight", pair, decay)
