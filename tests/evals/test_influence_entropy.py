"""The entropy of influence: bounds, temperature, and every architecture that has an influence matrix."""

import math

import pytest
import torch

from basecap.errors import DataError
from basecap.evals import build_evaluation
from basecap.evals._influence import normalised
from basecap.evals.influence_entropy import layer_entropies
from basecap.models.config import LayerConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.ops.attention import entropy

TOKENS = torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(0))


def built(use: str, **options) -> LanguageModel:
    pattern = (LayerConfig(use=use, mixer=options),)
    return LanguageModel(model_config(use, hidden=32, vocab=50, layers=2, pattern=pattern, max_length=24)).initialise(0)


def test_entropy_of_known_distributions():
    found = entropy(normalised(torch.tensor([[1.0, 1.0, -1.0, 1.0], [0.0, 5.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])))
    torch.testing.assert_close(found, torch.tensor([math.log(4), 0.0, 0.0]))


def test_lower_temperature_gives_lower_entropy():
    found = [
        sum(layer_entropies(built("transformer++ temperature", temperature=t), TOKENS).values()) for t in (0.1, 1, 100)
    ]
    assert found[0] < found[1] < found[2]
    uniform = sum(math.log(t) for t in range(1, 25)) / 24
    assert found[2] / 2 == pytest.approx(uniform, rel=1e-3)


@pytest.mark.parametrize("use", ["mamba-2", "top1-element", "rwkv-7", "gated-deltanet"])
def test_other_architectures_have_entropies_within_bounds(use: str):
    found = layer_entropies(built(use), TOKENS)
    assert len(found) >= 2
    assert all(0 <= value <= math.log(24) for value in found.values())
    if use == "top1-element":
        assert max(found.values()) == 0


def test_one_number_per_domain_and_layer(context, model):
    outcome = build_evaluation({"influence-entropy": {"length": 16, "windows": 2}}).run(model, context)
    assert {(item.subset, item.axis["layer"]) for item in outcome.measurements} == {("prose", 0.0), ("code", 0.0)}
    assert all(item.n == 32 and 0 < item.value < math.log(16) for item in outcome.measurements)


def test_documents_that_are_too_short_are_named(context, model):
    longer = LanguageModel(model.config.model_copy(update={"max_length": 10_000})).initialise(0)
    with pytest.raises(DataError, match="influence-entropy"):
        build_evaluation({"influence-entropy": {"length": 9_000}}).run(longer, context)
