"""Whole models against the independent ones of `transformers`: the same weights give the same logits and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from basecap.models.config import LayerConfig, model_config
from basecap.models.language_model import LanguageModel

HIDDEN, VOCAB, HEADS, LENGTH = 64, 50, 4, 37
#: Our name, theirs, and our parameter in their layout.
Rows = list[tuple[str, str, Callable[[Tensor], Tensor]]]


def ours(use: str, layers: int, **options) -> LanguageModel:
    pattern = (LayerConfig(use=use, mixer=options),)
    config = model_config(use, hidden=HIDDEN, vocab=VOCAB, layers=layers, max_length=64, pattern=pattern)
    return LanguageModel(config).initialise(0).double()


def same(x: Tensor) -> Tensor:
    return x


def interleaved(x: Tensor) -> Tensor:
    """[3 x heads x ...] -> [heads x 3 x ...]: GPT-NeoX keeps query, key and value of a head together."""
    return x.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2)


def with_bias(rows: Rows) -> Rows:
    return [(f"{a}.{part}", f"{b}.{part}", layout) for a, b, layout in rows for part in ("weight", "bias")]


def pythia() -> tuple[LanguageModel, nn.Module, Rows]:
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        attn_implementation="eager",
        use_cache=False,
    )
    rows: Rows = [("norm", "gpt_neox.final_layer_norm", same)]
    for i in range(2):
        block, layer = f"blocks.{i}", f"gpt_neox.layers.{i}"
        rows += [
            (f"{block}.mixer_norm", f"{layer}.input_layernorm", same),
            (f"{block}.feed_forward_norm", f"{layer}.post_attention_layernorm", same),
            (f"{block}.mixer.project.qkv", f"{layer}.attention.query_key_value", interleaved),
            (f"{block}.mixer.out", f"{layer}.attention.dense", same),
            (f"{block}.feed_forward.up", f"{layer}.mlp.dense_h_to_4h", same),
            (f"{block}.feed_forward.down", f"{layer}.mlp.dense_4h_to_h", same),
        ]
    ends: Rows = [("embedding.weight", "gpt_neox.embed_in.weight", same), ("head.weight", "lm_head.weight", same)]
    return ours("pythia", 2, heads=HEADS), GPTNeoXForCausalLM(config), with_bias(rows) + ends


def transformer() -> tuple[LanguageModel, nn.Module, Rows]:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_head=HEADS,
        n_layer=2,
        n_positions=64,
        activation_function="gelu",
        attn_implementation="eager",
        use_cache=False,
    )
    rows: Rows = [("norm", "transformer.ln_f", same)]
    for i in range(2):
        block, layer = f"blocks.{i}", f"transformer.h.{i}"
        rows += [
            (f"{block}.mixer_norm", f"{layer}.ln_1", same),
            (f"{block}.feed_forward_norm", f"{layer}.ln_2", same),
            (f"{block}.mixer.project.qkv", f"{layer}.attn.c_attn", Tensor.t),
            (f"{block}.mixer.out", f"{layer}.attn.c_proj", Tensor.t),
            (f"{block}.feed_forward.up", f"{layer}.mlp.c_fc", Tensor.t),
            (f"{block}.feed_forward.down", f"{layer}.mlp.c_proj", Tensor.t),
        ]
    ends: Rows = [
        ("embedding.weight", "transformer.wte.weight", same),
        ("positions.weight", "transformer.wpe.weight", same),
    ]
    return ours("transformer", 2, heads=HEADS), GPT2LMHeadModel(config), with_bias(rows) + ends


def stack(names: dict[str, str]) -> Rows:
    """The rows of two blocks that are a norm and a mixer with these parameters."""
    rows: Rows = [
        ("embedding.weight", "backbone.embeddings.weight", same),
        ("norm.weight", "backbone.norm_f.weight", same),
    ]
    for i in range(2):
        block, layer = f"blocks.{i}", f"backbone.layers.{i}"
        rows.append((f"{block}.mixer_norm.weight", f"{layer}.norm.weight", same))
        for name, other in names.items():
            layout = (lambda x: x[:, None]) if name == "conv.weight" else same
            rows.append((f"{block}.mixer.{name}", f"{layer}.mixer.{other}", layout))
    return rows


SSM = {"conv.weight": "conv1d.weight", "conv.bias": "conv1d.bias"}
SSM |= {name: name for name in ("in_proj.weight", "out_proj.weight", "A_log", "D")}


def mamba_1() -> tuple[LanguageModel, nn.Module, Rows]:
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, use_cache=False, tie_word_embeddings=True
    )
    names = SSM | {name: name for name in ("x_proj.weight", "dt_proj.weight", "dt_proj.bias")}
    return ours("mamba-1", 1), MambaForCausalLM(config), stack(names)


def mamba_2() -> tuple[LanguageModel, nn.Module, Rows]:
    config = Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_heads=2,
        n_groups=1,
        chunk_size=8,
        num_hidden_layers=2,
        use_cache=False,
        tie_word_embeddings=True,
    )
    return (
        ours("mamba-2", 1),
        Mamba2ForCausalLM(config),
        stack(SSM | {"dt_bias": "dt_bias", "norm_weight": "norm.weight"}),
    )


def assert_same(name: str, actual: Tensor, expected: Tensor) -> None:
    # The other implementations keep rotary angles, norms and states in float32.
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, f"{name} differs by {error:.1e} of its largest value"


@pytest.mark.parametrize("build", [pythia, transformer, mamba_1, mamba_2])
def test_logits_and_all_gradients(build: Callable[[], tuple[LanguageModel, nn.Module, Rows]]):
    model, theirs, rows = build()
    other = dict(theirs.double().eval().named_parameters())
    own = dict(model.named_parameters())
    assert sorted(name for name, _, _ in rows) == sorted(own)
    assert sorted(name for _, name, _ in rows) == sorted(other)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, their_name, layout in rows:
            own[name] += 0.1 * torch.randn(own[name].shape, generator=generator, dtype=torch.float64)
            assert other[their_name].shape == layout(own[name]).shape, name
            other[their_name].copy_(layout(own[name]))
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    weight = torch.randn(2, LENGTH, VOCAB, generator=generator, dtype=torch.float64)
    logits, expected = model.logits(tokens), theirs(tokens).logits
    assert_same("logits", logits, expected)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, their_name, layout in rows:
        assert_same(name, layout(own[name].grad), other[their_name].grad)
