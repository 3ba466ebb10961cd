"""Gated DeltaNet: parity with transformers' Qwen3-Next, identities, published sizes."""

import sys

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers import LayerSpec, initialise
from basecap.mixers.deltanet import DeltaNet
from basecap.mixers.gated_deltanet import GatedDeltaNet
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.testing.check_mixer import check_mixer


def build(seed: int = 0) -> GatedDeltaNet:
    mixer = GatedDeltaNet(GatedDeltaNet.Config(heads=4, key_heads=2, head_dim=8), LayerSpec(hidden=32))
    initialise(mixer, mixer.recipe(), seed)
    return mixer


def in_their_layout(mixer: GatedDeltaNet, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what `values` holds for each parameter of `mixer` by transformers' names, interleaved by head."""
    memory = mixer.memory
    keys = memory.key_heads * memory.key_dim

    def by_head(*parts: Tensor) -> Tensor:
        return torch.cat([part.unflatten(0, (memory.key_heads, -1)) for part in parts], dim=1).flatten(0, 1)

    left = dict(values)
    q, k, v = left.pop("memory.qkv.weight").split([keys, keys, memory.heads * memory.value_dim])
    theirs = {
        "in_proj_qkvz.weight": by_head(q, k, v, left.pop("gate.weight")),
        "in_proj_ba.weight": by_head(left.pop("memory.beta.weight"), left.pop("decay.weight")),
        "conv1d.weight": left.pop("memory.conv.weight")[:, None],
        "A_log": left.pop("A_log"),
        "dt_bias": left.pop("dt_bias"),
        "norm.weight": left.pop("norm_weight"),
        "out_proj.weight": left.pop("out.weight"),
    }
    assert not left
    return theirs


def oracle(mixer: GatedDeltaNet) -> torch.nn.Module:
    """Return transformers' layer with the weights of `mixer`."""
    from transformers.models.qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    memory = mixer.memory
    H, K, V = memory.heads, memory.key_dim, memory.value_dim
    config = Qwen3NextConfig(
        hidden_size=mixer.layer.hidden,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=memory.key_heads,
        linear_num_value_heads=H,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        rms_norm_eps=1e-6,
    )
    layer = Qwen3NextGatedDeltaNet(config, layer_idx=0)
    layer.load_state_dict(in_their_layout(mixer, dict(mixer.named_parameters())))
    return layer


def test_equals_qwen3_next_in_outputs_and_all_gradients(monkeypatch):
    # Where flash-linear-attention is installed transformers would run its GPU kernels.
    monkeypatch.setitem(sys.modules, "fla", None)
    mixer = build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():  # as initialised, the norm does nothing
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    layer = oracle(mixer)
    x, weight = torch.randn(2, 2, 150, 32, generator=generator)
    found = []
    for module in (mixer, layer):
        inputs = x.clone().requires_grad_()
        y = module(inputs)
        parameters = dict(module.named_parameters())
        grad, *grads = torch.autograd.grad((y * weight).sum(), [inputs, *parameters.values()])
        found.append(({"y": y, "x": grad}, dict(zip(parameters, grads, strict=True))))
    (ours, our_grads), (theirs, their_grads) = found
    ours, theirs = ours | in_their_layout(mixer, our_grads), theirs | their_grads
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        atol = 1e-5 * expected.detach().abs().max().item()
        torch.testing.assert_close(
            ours[name], expected, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_heads_that_share_keys_conform(monkeypatch):
    monkeypatch.setattr("basecap.testing._initialisation.DEPTHS", (12,))
    report = check_mixer("gated-deltanet", options={"heads": 4, "key_heads": 2}, length=70, longest=0)
    assert report.checks
    report.raise_failures()
    with pytest.raises(ConfigError, match="heads by key_heads"):
        GatedDeltaNet(GatedDeltaNet.Config(heads=4, key_heads=3), LayerSpec(hidden=32))


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
        model = LanguageModel(model_config("gated-deltanet", hidden=768, vocab=32_000, tied=True))
    mixer = model.blocks[0].mixer
    assert (mixer.memory.heads, mixer.memory.key_dim, mixer.memory.value_dim) == (6, 96, 192)
    assert model.config.depth == 12
