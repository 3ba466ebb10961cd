"""Averaged weights: the weighting is the paper's, evaluations see the average, training does not, a resume is exact."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train import checkpoint
from basecap.train.average import WeightAverage, exponent
from basecap.train.distributed import Processes
from basecap.train.loop import DevicePlacement, Trainer
from tests.train.conftest import BATCH, LENGTH, config

PLACEMENT = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32")
EVERY = {"eval_every": 5 * BATCH * LENGTH}


def train(path, model, stream, options, evaluate=lambda model, step, tokens: None) -> LanguageModel:
    model = LanguageModel(model.config).initialise(0)
    trainer = Trainer(model, options, 0, workload=stream, records=RunRecords(path), placement=PLACEMENT)
    trainer.run("test", evaluate)
    return model


@pytest.mark.parametrize("width", [0.02, 0.1, 0.25])
def test_the_weighting_has_the_width_that_is_asked_for(width):
    power, steps = exponent(width), np.arange(1, 20_001) / 20_000
    weights = steps**power / (steps**power).sum()
    assert np.sqrt((weights * steps**2).sum() - (weights * steps).sum() ** 2) == pytest.approx(width, rel=1e-3)


def test_weights_count_by_a_power_of_their_step_and_the_first_ones_not_at_all():
    module = torch.nn.Linear(1, 1, bias=False)
    average = WeightAverage(module, 0.1)
    for step in range(1, 401):
        torch.nn.init.constant_(module.weight, step / 400)
        average.update(step)
        assert step > 1 or average.values["weight"].item() == module.weight.item()
    power = exponent(0.1)
    expected = (power + 1) / (power + 2)  # the mean of the continuous weighting
    assert average.values["weight"].item() == pytest.approx(expected, abs=2e-3)


def test_evaluations_see_the_average_and_training_never_does(model, stream, tmp_path):
    plain, averaged, seen = {}, {}, {}

    def store(into):
        return lambda model, step, tokens: into.update(
            {step: {name: parameter.detach().clone() for name, parameter in model.named_parameters()}}
        )

    def every(model, step, tokens):
        store(seen)(model, step, tokens)
        assert not model.training

    one = train(tmp_path / "plain", model, stream, config(eval_every=BATCH * LENGTH), store(plain))
    two = train(tmp_path / "averaged", model, stream, config(average=0.1, **EVERY), every)
    expected = WeightAverage(model, 0.1)
    for step, weights in plain.items():
        model.load_state_dict(weights)
        expected.update(step)
        averaged[step] = {name: value.clone() for name, value in expected.values.items()}
    assert sorted(seen) == [5, 10, 15, 20]
    for step, weights in seen.items():
        for name, weight in weights.items():
            assert torch.equal(weight, averaged[step][name]) and not torch.equal(weight, plain[step][name])
    for parameter, other in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(parameter, other)
    loaded = checkpoint.load_stored(checkpoint.latest(tmp_path / "averaged" / "resume"))  # what `generate` uses
    assert all(torch.equal(parameter, seen[20][name]) for name, parameter in loaded.named_parameters())


def test_an_average_is_resumed_to_the_bit(model, stream, tmp_path):
    found: dict[str, dict[str, torch.Tensor]] = {"straight": {}, "resumed": {}}

    def evaluate(into, stop=None):
        def look(model, step, tokens):
            if step == stop:
                raise InterruptedError
            into[step] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

        return look

    options = config(average=0.05, **EVERY)
    train(tmp_path / "straight", model, stream, options, evaluate(found["straight"]))
    with pytest.raises(InterruptedError):
        train(tmp_path / "resumed", model, stream, options, evaluate(found["resumed"], stop=15))
    train(tmp_path / "resumed", model, stream, options, evaluate(found["resumed"]))
    assert list(found["resumed"]) == [5, 10, 15, 20]
    assert all(torch.equal(found["resumed"][step], weights) for step, weights in found["straight"].items())


def test_a_failing_evaluation_leaves_the_weights_as_they_were(model):
    average, held = WeightAverage(model, 0.1), model.embedding.weight.detach().clone()
    torch.nn.init.zeros_(average.values["embedding.weight"])
    with pytest.raises(InterruptedError), average.applied():
        assert not model.embedding.weight.any()
        raise InterruptedError
    assert torch.equal(model.embedding.weight, held) and not average.values["embedding.weight"].any()


def test_compiled_training_goes_on_after_an_evaluation_of_the_average(model, stream, tmp_path, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled(function, backend="eager"))
    for name, options in {
        "plain": config(compile=True),
        "averaged": config(compile=True, average=0.1, **EVERY),
    }.items():
        train(tmp_path / name, model, stream, options)
    plain, averaged = (
        [row["train_loss"] for row in RunRecords(tmp_path / name).metrics()] for name in ("plain", "averaged")
    )
    assert plain == averaged and len(plain) == 20


@pytest.mark.parametrize("width", [0, -0.1, 0.3])
def test_a_width_that_is_none_is_refused(width):
    with pytest.raises(ValidationError, match="average"):
        config(average=width)
