"""Muon for the matrices of blocks, AdamW for the rest: which are which, the size of updates, resume, refusals."""

import copy

import pytest
import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, Architecture, LayerChoice, ParameterRecipe, constant
from basecap.mixers.attention import Attention
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.models.outline import outline
from basecap.train import checkpoint
from basecap.train.config import TrainConfig, TrainSection
from basecap.train.optim import build_optimiser, hidden_matrices, moments_count, set_learning_rate
from tests.train.conftest import save

MUON = TrainConfig(tokens=1, optimiser="muon", lr=0.01, weight_decay=0.0)


def model(use: str = "transformer++") -> LanguageModel:
    return LanguageModel(model_config(use, hidden=32, vocab=50, layers=1, max_length=16)).initialise(0)


def give_gradients(built: LanguageModel) -> None:
    tokens = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(0))
    built(tokens[:, :-1], tokens[:, 1:]).backward()


def names(built: LanguageModel) -> set[str]:
    return {name.split(".", 2)[2] for name in hidden_matrices(built, built.recipe(), MUON)}


def test_matrices_are_those_of_linear_layers_in_blocks():
    feed_forward = {f"feed_forward.{name}.weight" for name in ("gate", "up", "down")}
    assert names(model()) == {"mixer.project.qkv.weight", "mixer.out.weight", *feed_forward}
    # Neither taps of convolutions, nor rates; embedding, norms and head are no part of blocks' matrices.
    assert names(model("mamba-2")) == {"mixer.in_proj.weight", "mixer.out_proj.weight"}
    # Maps of low rank are matrices, whether they are Linear layers or parameters of a class of their own.
    assert {"mixer.decay_down.weight", "mixer.decay_up.weight"} < names(model("kda"))
    assert {"mixer.decay.down", "mixer.decay.up"} < names(model("rwkv-6")) & names(model("rwkv-7"))


def test_updates_of_matrices_are_orthogonal_and_as_large_as_those_of_adamw():
    built = model()
    give_gradients(built)
    before = copy.deepcopy(built)
    build_optimiser(built, built.recipe(), MUON).step()
    own = hidden_matrices(built, built.recipe(), MUON)
    changes = {
        name: (parameter - before.get_parameter(name)).detach() / MUON.lr
        for name, parameter in built.named_parameters()
    }
    for change in (changes[name] for name in own):
        # The iteration brings all but the smallest singular values near to one size, and elements near to 0.2.
        sizes = torch.linalg.svdvals(change) / (0.2 * max(change.shape) ** 0.5)
        assert sizes.median() > 0.7 and sizes.max() < 1.3
        assert 0.15 < change.square().mean().sqrt() < 0.22
    for name in changes.keys() - own:
        moved = changes[name][built.get_parameter(name).grad.abs() > 1e-5].abs()
        torch.testing.assert_close(moved, torch.ones_like(moved), rtol=0.05, atol=0)


def test_rates_and_factors_reach_both():
    built = model("rwkv-6")
    optimiser = build_optimiser(built, built.recipe(), MUON)
    set_learning_rate(optimiser, 0.5)
    rates = {id(p): group["lr"] for group in optimiser.param_groups for p in group["params"]}
    recipes = built.recipe()
    assert {rates[id(p)] / recipes[name].lr for name, p in built.named_parameters()} == {0.5}
    give_gradients(built)
    before = copy.deepcopy(built.state_dict())
    set_learning_rate(optimiser, 0.0)
    optimiser.step()
    assert all(torch.equal(value, before[name]) for name, value in built.state_dict().items())


def test_resumed_training_is_the_same(tmp_path):
    first, second = model(), model()
    optimisers = [build_optimiser(built, built.recipe(), MUON) for built in (first, second)]
    give_gradients(first)
    optimisers[0].step()
    assert checkpoint.restore(checkpoint.latest(save(tmp_path, first, optimisers[0], 1)), second, optimisers[1]) == 1
    for built, optimiser in zip((first, second), optimisers, strict=True):
        optimiser.zero_grad()
        give_gradients(built)
        optimiser.step()
    for (name, own), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(own, other), name


def test_memory_of_a_plan():
    built = outline(model_config("transformer++", hidden=32, vocab=50, layers=1))
    matrices = 32 * (4 * 32 + 3 * 128)
    assert moments_count(built, MUON) == 2 * built.parameters_count() - matrices
    assert moments_count(built, TrainConfig(tokens=1)) == 2 * built.parameters_count()


class NoMatrix(Attention):
    def recipe(self):
        return {
            name: ParameterRecipe(init=recipe.init, decay=recipe.decay, matrix=False)
            for name, recipe in super().recipe().items()
        }


class NoMatrixEither(Attention):
    def recipe(self):
        own = ParameterRecipe(init=constant(0.0), matrix=True)
        return super().recipe() | {"sinks": own}


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        (NoMatrix, {}, "mixer NoMatrix names no matrix, and Muon trains matrices; give one matrix=True, or use"),
        (NoMatrixEither, {"sinks": True}, r"'blocks\.0\.mixer\.sinks' calls it a matrix, but its shape is \[2\]"),
    ],
)
def test_recipes_without_matrices_are_refused(mixer, options, message, monkeypatch):
    choice = LayerChoice(mixer=mixer, options={"heads": 2, **options})
    entry = Architecture(name="odd", layers=(choice,), backbone="transformer++", summary="", paper="")
    ARCHITECTURES.names()  # else the plain mixers' files, imported later, would go with the test
    monkeypatch.setitem(ARCHITECTURES._entries, "odd", entry)
    with pytest.raises(ConfigError, match=message):
        build_optimiser(model("odd"), model("odd").recipe(), MUON)


def test_what_muon_needs(monkeypatch):
    with pytest.raises(ConfigError, match=r"needs whole matrices in each process; use train\.parallel = ddp"):
        TrainSection(optimiser="muon", parallel="fsdp")
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"train\.optimiser = muon needs torch 2\.9 or newer, not 2"):
        build_optimiser(model(), model().recipe(), MUON)
