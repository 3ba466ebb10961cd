"""Mamba-1 against an independent implementation, its variants, global selection, its counts."""

import pytest
import torch
from torch import Tensor, nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from basecap.mixers import ARCHITECTURES, LayerSpec, Mixer, initialise
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.mixers._parity import assert_equals_module


def build(name: str, hidden: int = 16, index: int = 7, **options: object) -> Mixer:
    choice = ARCHITECTURES.get(name).layers[0]
    spec = LayerSpec(hidden=hidden, index=index, depth=8, max_length=32)
    module = choice.mixer(choice.configure(hidden, options), spec).double()
    initialise(module, module.recipe(), 0)
    return module


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_parity_with_transformers():
    ours = build("mamba-1", state=8)
    config = MambaConfig(hidden_size=16, state_size=8, time_step_rank=1, num_hidden_layers=1)
    theirs = MambaMixer(config, layer_idx=0).double()
    pairs = [
        (ours.in_proj.weight, theirs.in_proj.weight),
        (ours.conv.weight, theirs.conv1d.weight),
        (ours.conv.bias, theirs.conv1d.bias),
        (ours.x_proj.weight, theirs.x_proj.weight),
        (ours.dt_proj.weight, theirs.dt_proj.weight),
        (ours.dt_proj.bias, theirs.dt_proj.bias),
        (ours.A_log, theirs.A_log),
        (ours.D, theirs.D),
        (ours.out_proj.weight, theirs.out_proj.weight),
    ]
    assert_equals_module(ours, theirs, pairs)


@pytest.mark.parametrize("name", ["mamba-1", "mamba-1 decay one", "mamba-1 global selection"])
def test_influence_applied_to_the_inputs_is_the_mixed_sequence(name: str):
    module = build(name)
    x = draw(2, 17, 16)
    raw_x, gate = module.in_proj(x).chunk(2, dim=-1)
    u = module.conv(raw_x)
    y = torch.einsum("bdts,bsd->btd", module.influence(x).whole(), u) + module.D * u
    torch.testing.assert_close(module.out_proj(y * nn.functional.silu(gate)), module(x))


def test_global_selection_gates_the_raw_step_size():
    module = build("mamba-1 global selection", global_width=5)
    x = draw(1, 12, 16)
    raw_x, _ = module.in_proj(x).chunk(2, dim=-1)
    padded = nn.functional.pad(raw_x, (0, 0, 4, 0))
    windows = padded.unfold(1, 5, 1)
    gate = nn.functional.silu(torch.einsum("btdw,dw->btd", windows, module.long_conv.weight) + module.long_conv.bias)
    u = module.conv(raw_x)
    low_rank = module.x_proj(u)[..., : module.rank]
    expected = nn.functional.softplus((low_rank @ module.dt_proj.weight.T) * gate + module.dt_proj.bias)
    dt, *_ = module._select(u, module.long_conv(raw_x))
    torch.testing.assert_close(dt, expected)


def test_global_selection_for_language_modelling_stands_in_every_eighth_layer():
    name = "mamba-1 global selection lm"
    assert [index for index in range(24) if build(name, index=index).long_conv is not None] == [7, 15, 23]
    assert build(name).long_conv.width == 8


@pytest.mark.parametrize(
    ("name", "length", "millions"),
    [
        ("mamba-1 global selection", 512, 115.096 + 4.755),
        ("mamba-1 global selection lm", 2048, 115.096 + 2.364),
    ],
)
def test_published_sizes(name: str, length: int, millions: float):
    with torch.device("meta"):
        model = LanguageModel(model_config(name, hidden=768, vocab=32_000, max_length=length))
    assert len(model.blocks) == 24
    assert model.parameters_count() / 1e6 == pytest.approx(millions, abs=2e-3)
