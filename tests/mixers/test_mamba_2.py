"""Mamba-2 against an independent implementation, its identities."""

import pytest
import torch
from torch import nn
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from basecap.mixers import ARCHITECTURES, LayerSpec, Mixer, initialise
from basecap.mixers._parts import parted
from tests.mixers._parity import assert_equals_module


def build(name: str, hidden: int = 32, dtype: torch.dtype = torch.float64, **options: object) -> Mixer:
    choice = ARCHITECTURES.get(name).layers[0]
    module = choice.mixer(choice.configure(hidden, options), LayerSpec(hidden=hidden, depth=2)).to(dtype)
    initialise(module, module.recipe(), 0)
    return module


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def oracle(groups: int) -> Mamba2Mixer:
    config = Mamba2Config(
        hidden_size=32, state_size=16, num_heads=8, head_dim=8, n_groups=groups, chunk_size=8, num_hidden_layers=1
    )  # fmt: skip
    return Mamba2Mixer(config, layer_idx=0).to(torch.float64)


@pytest.mark.parametrize("groups", [1, 2])
def test_parity_with_transformers(groups: int):
    ours = build("mamba-2", state=16, heads=8, groups=groups)
    theirs = oracle(groups)
    pairs = [
        (ours.in_proj.weight, theirs.in_proj.weight),
        (ours.conv.weight, theirs.conv1d.weight),
        (ours.conv.bias, theirs.conv1d.bias),
        (ours.dt_bias, theirs.dt_bias),
        (ours.A_log, theirs.A_log),
        (ours.D, theirs.D),
        (ours.norm_weight, theirs.norm.weight),
        (ours.out_proj.weight, theirs.out_proj.weight),
    ]
    assert_equals_module(ours, theirs, pairs)


def test_without_decay_it_is_linear_attention():
    module = build("mamba-2 decay none w/o conv", norm=False)
    x = draw(2, 30, 32)
    gate, mixed, raw_dt = parted(module.in_proj, x, module.parts)
    u, k, q = nn.functional.silu(mixed).split([64, 128, 128], dim=-1)
    dt = nn.functional.softplus(raw_dt + module.dt_bias)
    attention = torch.einsum("btk,bsk->bts", q, k).tril() @ (u * dt)
    expected = module.out_proj((attention + module.D * u) * nn.functional.silu(gate))
    torch.testing.assert_close(module(x), expected)


def test_one_decay_is_shared_by_all_heads():
    module = build("mamba-2 decay one", heads=4)
    matrix = module.influence(draw(1, 9, 32)).whole()
    dt = nn.functional.softplus(parted(module.in_proj, draw(1, 9, 32), module.parts)[2][..., :-1] + module.dt_bias[:-1])
    per_value = matrix / dt.transpose(1, 2)[:, :, None]
    torch.testing.assert_close(per_value, per_value[:, :1].expand_as(per_value))


def test_influence_applied_to_the_values_is_the_mixed_sequence():
    module = build("mamba-2", heads=4)
    x = draw(2, 17, 32)
    matrix = module.influence(x).whole()
    gate, mixed, _ = parted(module.in_proj, x, module.parts)
    u = module.conv(mixed)[..., :64].unflatten(-1, (4, 16))
    o = torch.einsum("bhts,bshv->bthv", matrix, u) + module.D[:, None] * u
    torch.testing.assert_close(module._finish(o.flatten(2), gate), module(x))
