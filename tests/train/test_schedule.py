"""The learning rate over a run, and the groups of the optimiser."""

import pytest
import torch
from pydantic import ValidationError

from basecap.mixers import ParameterRecipe, constant
from basecap.train.config import Timetable, TrainConfig
from basecap.train.optim import build_optimiser, set_learning_rate
from basecap.train.schedule import learning_rate


def rates(schedule: str, steps: int = 100, warmup: int = 10, final: float = 0.0) -> list[float]:
    return [
        learning_rate(step, steps, peak=1.0, final=final, warmup=warmup, schedule=schedule) for step in range(steps)
    ]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rate_rises_to_the_peak_and_falls_towards_the_end(schedule: str):
    found = rates(schedule, final=0.1)
    assert found[0] == 0.1 and found[10] == 1.0
    assert found[:10] == sorted(found[:10]) and found[10:] == sorted(found[10:], reverse=True)
    assert 0.1 < found[-1] < 0.12


def test_halfway_values_are_the_formulas():
    assert rates("linear")[55] == pytest.approx(0.5)
    assert rates("cosine")[55] == pytest.approx(0.5)
    assert rates("constant")[99] == 1.0


def test_a_warmup_longer_than_a_tenth_of_the_run_is_cut():
    assert rates("constant", steps=50, warmup=2500)[5] == 1.0


def test_groups_follow_the_recipes():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2, bias=False)})
    one = constant(0.0)
    recipes = {
        "a.weight": ParameterRecipe(init=one),
        "a.bias": ParameterRecipe(init=one, decay=False),
        "b.weight": ParameterRecipe(init=one, lr=2.0),
    }
    optimiser = build_optimiser(model, recipes, TrainConfig(tokens=1, weight_decay=0.3, eps=1e-6))
    assert {group["eps"] for group in optimiser.param_groups} == {1e-6}
    set_learning_rate(optimiser, 0.5)
    found = {(group["lr"], group["weight_decay"]) for group in optimiser.param_groups}
    assert found == {(0.5, 0.3), (0.5, 0.0), (1.0, 0.3)}


def test_embeddings_gains_and_biases_may_have_a_weight_decay_of_their_own():
    parts = {"tokens": torch.nn.Embedding(4, 2), "table": torch.nn.Linear(2, 2), "plain": torch.nn.Embedding(2, 2)}
    model, one = torch.nn.ModuleDict(parts), constant(0.0)
    recipes = {
        "tokens.weight": ParameterRecipe(init=one),
        "table.weight": ParameterRecipe(init=one, embedding=True),
        "table.bias": ParameterRecipe(init=one, decay=False),
        "plain.weight": ParameterRecipe(init=one, embedding=False),
    }

    def decays(**options: float) -> list[tuple[float, list[str]]]:
        optimiser = build_optimiser(model, recipes, TrainConfig(tokens=1, weight_decay=0.3, **options))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [(group["weight_decay"], [names[id(p)] for p in group["params"]]) for group in optimiser.param_groups]

    matrices, other = ["tokens.weight", "table.weight", "plain.weight"], ["table.bias"]
    assert decays() == [(0.0, other), (0.3, matrices)]
    assert decays(other_weight_decay=0.3, embedding_weight_decay=0.3) == [(0.3, other), (0.3, matrices)]
    assert decays(embedding_weight_decay=0.0) == [(0.0, other), (0.0, matrices[:2]), (0.3, matrices[2:])]


def test_a_parameter_without_recipe_is_refused():
    with pytest.raises(KeyError, match="weight"):
        build_optimiser(torch.nn.Linear(2, 2), {}, TrainConfig(tokens=1))


def test_numbers_as_yaml_writes_them():
    found = TrainConfig.model_validate({"tokens": "100e9", "lr": "2e-4", "batch": 256.0})
    assert (found.tokens, found.lr, found.batch) == (100_000_000_000, 2e-4, 256)
    with pytest.raises(ValidationError):
        TrainConfig.model_validate({"tokens": 1.5})


@pytest.mark.parametrize("eval_every", [1, 3, 7, 20, 50, None])
def test_evaluations_are_counted_without_going_through_the_steps(eval_every: int | None):
    timetable = Timetable(TrainConfig(tokens=20, batch=1, eval_every=eval_every), 1)
    assert timetable.evaluations == sum(timetable.evaluates(step) for step in range(timetable.steps + 1))
    assert Timetable(TrainConfig(tokens=10**15), 1).evaluations == 20


@pytest.mark.parametrize("steps", [1, 7, 19, 20, 35, 59, 293, 915])
@pytest.mark.parametrize("eval_every", [None, 1, 4, 100])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_evaluations_after_a_share_of_the_run_are_those_that_happen(steps: int, eval_every: int | None, share: float):
    timetable = Timetable(TrainConfig(tokens=steps, batch=1, eval_every=eval_every), 1)
    happen = [step for step in range(steps + 1) if timetable.evaluates(step)]
    assert timetable.evaluations_after(share) == sum(step > share * steps for step in happen)
    if eval_every is None:
        assert len(happen) == min(20, steps) and happen[-1] == steps
        assert all(timetable.saves(step) for step in happen)


@pytest.mark.parametrize("keep", ["last", "all", 1, 2, 3, 50])
@pytest.mark.parametrize(
    ("steps", "eval_every"), [(1, None), (7, None), (45, None), (100, None), (10, 3), (9, 3), (5, 9)]
)
def test_weights_stay_at_evaluation_points(steps, eval_every, keep):
    timetable = Timetable(TrainConfig(tokens=steps, batch=1, eval_every=eval_every, keep=keep), 1)
    points = [done for done in range(steps + 1) if timetable.evaluates(done)]
    assert timetable.points == points and len(points) == timetable.evaluations
    kept = points[-1:] if keep == "last" else points if keep == "all" else points[keep - 1 :: keep]
    found = [done for done in range(1, steps + 1) if timetable.keeps(done)]
    assert set(found) - set(points[-1:]) <= set(kept) <= set(found) and len(found) == timetable.kept
