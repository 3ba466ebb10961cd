"""The tables of official values name every architecture, and notice what is not as published."""

import pytest

from basecap.mixers import ARCHITECTURES, ParameterRecipe, constant, normal, orthogonal, uniform
from basecap.mixers._state_space import log_of_uniform
from basecap.models.language_model import LanguageModel
from tests.mixers import (
    test_published_attention,
    test_published_convolutions,
    test_published_delta,
    test_published_fox,
    test_published_hybrids,
    test_published_mamba,
    test_published_rwkv,
    test_published_sparse,
    test_published_xlstm,
)
from tests.mixers._published import assert_table_holds

TABLES = {
    **test_published_attention.TABLES,
    **test_published_convolutions.TABLES,
    **test_published_delta.TABLES,
    **test_published_fox.TABLES,
    **test_published_hybrids.TABLES,
    **test_published_mamba.TABLES,
    **test_published_rwkv.TABLES,
    **test_published_xlstm.TABLES,
    **test_published_sparse.TABLES,
}


def test_every_architecture_has_a_table():
    assert set(TABLES) == {name for name in ARCHITECTURES.names() if ARCHITECTURES.built_in(name)}


@pytest.mark.parametrize(
    ("name", "parameter", "wrong"),
    [
        # What the recipes were before they were compared with the official code.
        ("deltanet", "blocks.1.mixer.memory.conv.weight", {"init": uniform(-0.5, 0.5)}),
        ("deltanet", "blocks.1.mixer.out.weight", {"init": normal(0.02 / 6**0.5)}),
        ("gated-deltanet", "blocks.0.feed_forward.down.weight", {"init": normal(0.02 / 6**0.5)}),
        ("rwkv-7", "blocks.2.mixer.receptance.weight", {"init": uniform(-0.5 / 128**0.5, 0.5 / 128**0.5)}),
        ("rwkv-7", "blocks.2.feed_forward.key.weight", {"init": uniform(-0.5 / 128**0.5, 0.5 / 128**0.5)}),
        ("rwkv-6", "blocks.1.feed_forward.share_k", {"init": constant(0.5)}),
        ("pythia", "blocks.1.mixer.out.weight", {"init": normal(0.02)}),
        ("transformer", "positions.weight", {"init": normal(0.02)}),
        ("based", "embedding.weight", {"decay": True}),
        # Other mistakes one could make.
        ("rwkv-5", "blocks.1.mixer.key.weight", {"init": orthogonal()}),
        ("rwkv-5", "blocks.1.mixer.decay", {"lr": 1.0}),
        ("rwkv-4", "blocks.1.mixer.bonus", {"decay": True}),
        ("mamba-1", "blocks.1.mixer.in_proj.weight", {"init": normal(128**-0.5 / 3**0.5)}),
        ("mamba-1", "blocks.1.mixer.dt_proj.bias", {"init": uniform(-6.9, -1.5)}),
        ("mamba-2", "blocks.1.mixer.A_log", {"init": log_of_uniform(0.01, 16.0)}),
        ("mamba-2", "blocks.1.mixer.A_log", {"decay": True}),
        ("hyena", "blocks.1.mixer.filter.last.weight", {"decay": True}),
        ("transformer++", "norm.weight", {"init": constant(0.9)}),
    ],
)
def test_a_wrong_recipe_is_noticed(name: str, parameter: str, wrong: dict, monkeypatch):
    right = LanguageModel.recipe

    def recipe(self: LanguageModel) -> dict[str, ParameterRecipe]:
        recipes = right(self)
        old = recipes[parameter]
        return recipes | {parameter: ParameterRecipe(**{"init": old.init, "lr": old.lr, "decay": old.decay} | wrong)}

    monkeypatch.setattr(LanguageModel, "recipe", recipe)
    with pytest.raises(AssertionError, match=parameter.replace(".", r"\.")):
        assert_table_holds(name, TABLES[name])


def test_a_parameter_without_a_row_is_noticed():
    with pytest.raises(AssertionError, match=r"blocks\.0\.mixer\.conv\.weight stands in 0 rows"):
        assert_table_holds("mamba-1", TABLES["mamba-1 w/o conv"])
    with pytest.raises(AssertionError, match="no parameter has these names"):
        assert_table_holds("mamba-1 w/o conv", TABLES["mamba-1"])
