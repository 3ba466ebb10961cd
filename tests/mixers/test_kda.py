"""Kimi Delta Attention and Gated DeltaNet-2: parity with transformers and fla, identities, published sizes."""

import sys

import pytest
import torch

from basecap.mixers import LayerSpec, initialise
from basecap.mixers.deltanet import DeltaNet
from basecap.mixers.kda import KDA
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.ops.channel_delta_rule import channel_delta_rule, decoupled_delta_rule
from basecap.ops.delta_rule import delta_rule
from tests.fla_naive import naive


def build(seed: int = 0, **options: object) -> KDA:
    mixer = KDA(KDA.Config(heads=2, head_dim=8, **options), LayerSpec(hidden=32))
    initialise(mixer, mixer.recipe(), seed)
    return mixer


def oracle(mixer: KDA) -> torch.nn.Module:
    """Return transformers' layer with the weights of `mixer`; it has no bias before the output gate."""
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    memory, keys = mixer.memory, mixer.memory.heads * mixer.memory.key_dim
    config = KimiLinearConfig(
        hidden_size=mixer.layer.hidden,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_heads=memory.heads,
        linear_head_dim=memory.key_dim,
        rms_norm_eps=1e-6,
    )
    layer = KimiLinearDeltaAttention(config, layer_idx=0).double()
    q, k, v = mixer.memory.qkv.weight.split(keys)
    layer.load_state_dict(
        {
            "q_proj.weight": q,
            "k_proj.weight": k,
            "v_proj.weight": v,
            "conv1d.weight": memory.conv.weight[:, None],
            "forget_gate.A_log": mixer.A_log[None, None, :, None],
            "forget_gate.dt_bias": mixer.dt_bias,
            "forget_gate.f_a_proj.weight": mixer.decay_down.weight,
            "forget_gate.f_b_proj.weight": mixer.decay_up.weight,
            "b_proj.weight": memory.beta.weight,
            "g_a_proj.weight": mixer.gate_down.weight,
            "g_b_proj.weight": mixer.gate_up.weight,
            "o_norm.weight": mixer.norm_weight,
            "o_proj.weight": mixer.out.weight,
        }
    )
    return layer


def test_equals_kimi_linear(monkeypatch):
    # Where flash-linear-attention is installed transformers would run its GPU kernels.
    monkeypatch.setitem(sys.modules, "fla", None)
    mixer = build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():  # as initialised, the norm does nothing
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            if name == "gate_up.bias":
                parameter.zero_()
    x, weight = torch.randn(2, 2, 70, 32, generator=generator)
    layer = oracle(mixer).float()
    found = []
    for module in (mixer, layer):
        inputs = x.clone().requires_grad_()
        y = module(inputs)
        found.append((y, *torch.autograd.grad((y * weight).sum(), inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


def test_the_memory_follows_the_recurrence_of_fla():
    recur = naive("kda/naive").naive_recurrent_kda
    generator = torch.Generator().manual_seed(2)
    q, k, v, f = torch.randn(4, 2, 40, 3, 8, generator=generator)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    beta, g = f[..., 0].sigmoid(), -4.0 * f.abs()
    state = torch.randn(2, 3, 8, 8, generator=generator)
    ours = channel_delta_rule(q * 8**-0.5, k, v, beta, g, state_BHKV=state)
    for found, expected in zip(ours, recur(q, k, v, g, beta, None, state, True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_memory_of_gated_deltanet_2_follows_the_recurrence_of_fla():
    recur = naive("gdn2/naive").naive_recurrent_gdn2
    generator = torch.Generator().manual_seed(2)
    q, k, v, f, b, w = torch.randn(6, 2, 40, 3, 8, generator=generator)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    b, w, g = b.sigmoid(), w.sigmoid(), -4.0 * f.abs()
    state = torch.randn(2, 3, 8, 8, generator=generator)
    ours = decoupled_delta_rule(q * 8**-0.5, k, w * v, b, g, state_BHKV=state)
    for found, expected in zip(ours, recur(q, k, v, g, b, w, None, state, True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_equal_strengths_of_all_channels_are_kda():
    """Gated DeltaNet-2 whose maps to the strengths have the same row for every channel of a head is KDA."""
    plain, wide = build(), build(gates="channel")
    with torch.no_grad():
        own = dict(plain.named_parameters())
        for name, parameter in wide.named_parameters():
            rows = own["memory.beta.weight" if name == "memory.write.weight" else name]
            parameter.copy_(rows if rows.shape == parameter.shape else rows.repeat_interleave(8, dim=0))
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(wide(x), plain(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("log_decay", [None, -0.3])
def test_equal_decays_are_those_of_gated_deltanet_and_none_those_of_deltanet(log_decay: float | None):
    memory = DeltaNet(DeltaNet.Config(heads=2), LayerSpec(hidden=16)).double()
    initialise(memory, memory.recipe(), 3)
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    q, k, v, beta = memory.memory.inputs(x)
    per_head = None if log_decay is None else torch.full_like(beta, log_decay)
    expected, _ = delta_rule(q, k, v, beta, per_head)
    equal = torch.full_like(k, log_decay or 0.0)
    torch.testing.assert_close(memory.memory(x, equal), expected, rtol=1e-10, atol=1e-10)
    # Gated DeltaNet-2 with equal strengths of erasing and writing as well.
    strength = beta[..., None]
    reduced, _ = decoupled_delta_rule(q, k, strength * v, strength.expand_as(k), equal)
    torch.testing.assert_close(reduced, expected, rtol=1e-10, atol=1e-10)


def test_negative_doubles_the_writing_strengths():
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(5))
    assert torch.equal(build(negative=True).memory.inputs(x)[3], 2 * build().memory.inputs(x)[3])


def test_published_size():
    with torch.device("meta"):
        model = LanguageModel(model_config("kda", hidden=768, vocab=32_000))
    mixer = model.blocks[0].mixer
    assert (mixer.memory.heads, mixer.memory.key_dim) == (6, 128)
    projections, bottlenecks, convolutions = 4 * 768**2, 4 * 128 * 768, 3 * 768 * 4
    rest = 768 * 6 + 6 + 768 + 768 + 128  # writing strengths, A, biases of decay and gate, gain
    assert sum(p.numel() for p in mixer.parameters()) == projections + bottlenecks + convolutions + rest
    with torch.device("meta"):
        wide = LanguageModel(model_config("gated-deltanet-2", hidden=768, vocab=32_000)).blocks[0].mixer
    # The strengths of each channel of keys and values in place of those of 6 heads.
    assert sum(p.numel() for p in wide.parameters()) - sum(p.numel() for p in mixer.parameters()) == 768 * (2 * 768 - 6)
