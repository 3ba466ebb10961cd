"""Mamba-2 against an independent implementation, its identities, its counts."""

import pytest
import torch
from torch import nn
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, LayerSpec, Mixer, initialise
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.mixers._parity import check_equals_module

NAMES = [
    "mamba-2",
    "mamba-2 decay one",
    "mamba-2 decay none",
    "mamba-2 decay none w/o conv",
    "mamba-2 w/o conv",
    "mamba-2 w/o gn",
    "mamba-2 state x2",
    "mamba-2 state x4",
]


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
    check_equals_module(ours, theirs, pairs)


def test_without_decay_it_is_linear_attention():
    module = build("mamba-2 decay none w/o conv", norm=False)
    x = draw(2, 30, 32)
    gate, mixed, raw_dt = module.in_proj(x)
    u, k, q = nn.functional.silu(mixed).split([64, 128, 128], dim=-1)
    dt = nn.functional.softplus(raw_dt + module.dt_bias)
    attention = torch.einsum("btk,bsk->bts", q, k).tril() @ (u * dt)
    expected = module.out_proj((attention + module.D * u) * nn.functional.silu(gate))
    torch.testing.assert_close(module(x), expected)


def test_one_decay_is_shared_by_all_heads():
    module = build("mamba-2 decay one", heads=4)
    matrix = module.influence(draw(1, 9, 32)).whole()
    dt = nn.functional.softplus(module.in_proj(draw(1, 9, 32))[2][..., :-1] + module.dt_bias[:-1])
    per_value = matrix / dt.transpose(1, 2)[:, :, None]
    torch.testing.assert_close(per_value, per_value[:, :1].expand_as(per_value))


def test_influence_applied_to_the_values_is_the_mixed_sequence():
    module = build("mamba-2", heads=4)
    x = draw(2, 17, 32)
    matrix = module.influence(x).whole()
    gate, mixed, _ = module.in_proj(x)
    u = module.conv(mixed)[..., :64].unflatten(-1, (4, 16))
    o = torch.einsum("bhts,bshv->bthv", matrix, u) + module.D[:, None] * u
    torch.testing.assert_close(module._finish(o.flatten(2), gate), module(x))


@pytest.mark.parametrize("name", NAMES)
def test_decoding_continues_a_prompt(name: str):
    module = build(name)
    x = draw(2, 23, 32)
    expected = module(x)
    cache = module.init_cache(2, 23)
    assert cache.nbytes == 2 * module.state_bytes(23)
    parts = [module.prefill(x[:, :19], cache)] + [module.step(x[:, t : t + 1], cache) for t in range(19, 23)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
    assert cache.length == 23


def test_packed_sequences_do_not_see_each_other():
    module = build("mamba-2")
    x = draw(1, 40, 32)
    segments = torch.tensor([[0] * 3 + [1] * 20 + [4] * 17])
    apart = [module(x[:, :3]), module(x[:, 3:23]), module(x[:, 23:])]
    torch.testing.assert_close(module(x, segments), torch.cat(apart, dim=1))


@pytest.mark.parametrize(("name", "hidden", "millions"), [("mamba-2", 768, 114.944), ("mamba-2", 2048, 1306.303)])
def test_published_sizes(name: str, hidden: int, millions: float):
    with torch.device("meta"):
        model = LanguageModel(model_config(name, hidden=hidden, vocab=32_000))
    assert len(model.blocks) == {768: 24, 2048: 48}[hidden]
    assert model.parameters_count() / 1e6 == pytest.approx(millions, abs=1e-3)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError):
        build("mamba-2", heads=7)
    with pytest.raises(ConfigError):
        build("mamba-2", heads=4, groups=3)
