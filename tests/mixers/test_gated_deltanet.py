"""Gated DeltaNet: parity with transformers' Qwen3-Next, identities, published sizes."""

import sys

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers._contract import ARCHITECTURES, LayerSpec, initialise
from basecap.mixers.deltanet import DeltaNet
from basecap.mixers.gated_deltanet import GatedDeltaNet
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.testing.check_mixer import check_mixer


def build(seed: int = 0) -> GatedDeltaNet:
    mixer = GatedDeltaNet(GatedDeltaNet.Config(heads=2, head_dim=8), LayerSpec(hidden=32))
    initialise(mixer, mixer.recipe(), seed)
    return mixer


def test_compiles():
    check_mixer("gated-deltanet", length=80, dtypes=(), compiled=True).raise_failures()


def oracle(mixer: GatedDeltaNet) -> torch.nn.Module:
    """Return transformers' layer with the weights of `mixer`, which it keeps interleaved by head."""
    from transformers.models.qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    memory = mixer.memory
    H, K, V = memory.heads, memory.key_dim, memory.value_dim
    config = Qwen3NextConfig(
        hidden_size=mixer.layer.hidden,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=H,
        linear_num_value_heads=H,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        rms_norm_eps=1e-5,
    )
    layer = Qwen3NextGatedDeltaNet(config, layer_idx=0)

    def by_head(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (H, -1))

    q, k, v = memory.qkv.weight.split([H * K, H * K, H * V])
    state = {
        "in_proj_qkvz.weight": torch.cat([by_head(x) for x in (q, k, v, mixer.gate.weight)], dim=1).flatten(0, 1),
        "in_proj_ba.weight": torch.cat([by_head(x.weight) for x in (memory.beta, mixer.decay)], dim=1).flatten(0, 1),
        "conv1d.weight": memory.conv.weight[:, None],
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
        "norm.weight": mixer.norm_weight,
        "out_proj.weight": mixer.out.weight,
    }
    layer.load_state_dict(state)
    return layer


def test_equals_qwen3_next_in_outputs_and_gradients(monkeypatch):
    # Where flash-linear-attention is installed transformers would run its GPU kernels.
    monkeypatch.setitem(sys.modules, "fla", None)
    mixer = build()
    layer = oracle(mixer)
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 2, 150, 32, generator=generator)
    results = []
    for module in (mixer, layer):
        inputs = x.clone().requires_grad_()
        y = module(inputs)
        (y * weight).sum().backward()
        results.append((y, inputs.grad))
    memory = mixer.memory
    pairs = [
        *zip(*results, strict=True),
        (mixer.A_log.grad, layer.A_log.grad),
        (mixer.dt_bias.grad, layer.dt_bias.grad),
        (mixer.norm_weight.grad, layer.norm.weight.grad),
        (mixer.out.weight.grad, layer.out_proj.weight.grad),
        (memory.conv.weight.grad, layer.conv1d.weight.grad[:, 0]),
        (torch.cat([memory.beta.weight.grad, mixer.decay.weight.grad]),
         layer.in_proj_ba.weight.grad.unflatten(0, (2, 2)).transpose(0, 1).flatten(0, 1)),
        (memory.qkv.weight.grad[:8], layer.in_proj_qkvz.weight.grad[:8]),
        (mixer.gate.weight.grad[:16], layer.in_proj_qkvz.weight.grad[32:48]),
    ]  # fmt: skip
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.detach().abs().max().item())


def test_without_decay_it_reads_what_deltanet_reads():
    plain = DeltaNet(DeltaNet.Config(heads=2), LayerSpec(hidden=16))
    gated = GatedDeltaNet(GatedDeltaNet.Config(heads=2, head_dim=8, value_expand=1), LayerSpec(hidden=16))
    for mixer in (plain, gated):
        initialise(mixer, mixer.recipe(), 3)
    gated.memory.load_state_dict(plain.memory.state_dict())
    torch.nn.init.constant_(gated.A_log, -torch.inf)
    x = torch.randn(2, 70, 16, generator=torch.Generator().manual_seed(4))
    assert torch.equal(gated.mixed(x)[1], plain.mixed(x)[1])


def test_published_size():
    with torch.device("meta"):
        model = LanguageModel(model_config("gated-deltanet", hidden=768, vocab=32_000))
    mixer = model.blocks[0].mixer
    assert (mixer.memory.heads, mixer.memory.key_dim, mixer.memory.value_dim) == (6, 96, 192)
    assert model.config.depth == 12
    assert round(model.parameters_count() / 1e6, 1) == 123.9


def test_recipe_starts_in_the_published_ranges():
    mixer = GatedDeltaNet(GatedDeltaNet.Config(heads=500, head_dim=2), LayerSpec(hidden=32))
    recipe = mixer.recipe()
    initialise(mixer, recipe, 0)
    A, dt = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 0 < A.min() < 0.5 < 15.5 < A.max() < 16
    assert 0.9e-3 < dt.min() < 1.5e-3 < 0.07 < dt.max() < 0.101
    assert not recipe["A_log"].decay
    assert not recipe["dt_bias"].decay
    assert recipe["out.weight"].decay


def test_sizes_that_do_not_divide_are_refused():
    choice = ARCHITECTURES.get("gated-deltanet").layers[0]
    config = choice.configure(64, {"heads": 5})
    with pytest.raises(ConfigError, match="divide"):
        GatedDeltaNet(config, LayerSpec(hidden=64))
