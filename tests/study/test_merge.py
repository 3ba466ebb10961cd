"""A study may grow where it stands, and in nothing else may it change."""

import hashlib
import json
from pathlib import Path

import pytest

from basecap.errors import ConfigError
from basecap.plan.runs import plan_evaluations, plan_runs
from basecap.study.config import StudyConfig
from basecap.study.merge import merge_studies

A, B, C = ({"name": name, "use": "transformer++"} for name in "abc")


@pytest.fixture
def made(study):
    def make(architectures: list, seeds: tuple = (0,), **more) -> StudyConfig:
        train = study["train"] | more.pop("train", {})
        content = study | {"architectures": architectures, "reference": "a", "train": train, "seeds": list(seeds)}
        return StudyConfig.model_validate(content | more)

    return make


def test_the_same_study_stays_itself(made):
    assert merge_studies(made([A, B]), made([A, B]), Path("out")) == made([A, B])


def test_another_summary_is_the_same_study(made):
    assert merge_studies(made([A], summary="old"), made([A], summary="new"), Path("out")) == made([A], summary="new")


def test_options_that_change_no_number_keep_the_study_the_same(made):
    control = B | {"control": True}
    changed = made([A, control], train={"keep": "all", "cuda_graphs": True}, any_architecture=True)
    assert merge_studies(made([A, B]), changed, Path("out")) == changed
    assert merge_studies(changed, made([A, B]), Path("out")) == made([A, B])


def test_the_place_and_preparation_of_text_keep_the_study_the_same(made, study):
    moved = made([A], data=study["data"] | {"path": "moved", "cache": "elsewhere", "workers": 2})
    assert merge_studies(made([A]), moved, Path("out")) == moved
    assert merge_studies(moved, made([A]), Path("out")) == made([A])
    with pytest.raises(ConfigError, match=r"data\.seq_len is 32 there and 16 here"):
        merge_studies(moved, made([A], data=study["data"] | {"seq_len": 16}), Path("out"))


@pytest.mark.parametrize(
    ("held", "wanted", "whole"),
    [
        (([A], [0]), ([A], [2, 1]), ([A], [0, 2, 1])),
        (([A, B], [0]), ([C, A], [0]), ([A, B, C], [0])),
        (([A, B], [0, 1]), ([A], [1]), ([A, B], [0, 1])),
    ],
)
def test_what_is_new_comes_behind(made, held, wanted, whole):
    assert merge_studies(made(*held), made(*wanted), Path("out")) == made(*whole)


@pytest.mark.parametrize(
    ("held", "wanted", "whole"),
    [(None, None, None), ([0, 5], None, (0, 5, 1)), (None, [5], (0, 5)), ([3], [5, 3], (3, 5))],
)
def test_the_reference_gets_more_seeds(made, held, wanted, whole):
    found = merge_studies(
        made([A, B], [0], reference_seeds=held), made([A, B], [1], reference_seeds=wanted), Path("out")
    )
    assert (found.seeds, found.reference_seeds) == ((0, 1), whole)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"architectures": [A, C], "train": {"lr": 2e-3}}, r"train\.lr is 0\.01 there and 0\.002 here"),
        ({"architectures": [A, B], "reference": "b"}, "reference is 'a' there and 'b' here"),
    ],
)
def test_another_study_is_refused_with_the_difference(made, change, difference):
    with pytest.raises(ConfigError, match=f"out holds another study .{difference}.*give another --out or remove it"):
        merge_studies(made([A, B]), made(**change), Path("out"))


def test_another_architecture_of_one_name_is_refused_and_may_have_another(made):
    other = {**B, "mixer": {"window": 4}}
    said = r"out holds another architecture 'b' \(mixer\.window is null there and 4 here\); give yours another name"
    with pytest.raises(ConfigError, match=said):
        merge_studies(made([A, B]), made([A, other]), Path("out"))
    assert merge_studies(made([A, B]), made([A, {**other, "name": "c"}]), Path("out"))


def test_evaluations_of_both_are_held_and_run_when_the_new_study_says(made):
    held = made([A], evals=["domain-loss", {"influence-entropy": {"length": 8, "at": "end"}}])
    found = merge_studies(held, made([A], evals=[{"influence-entropy": {"length": 8}}]), Path("out"))
    assert found.evals == ("domain-loss", {"influence-entropy": {"length": 8}})
    with pytest.raises(
        ConfigError,
        match=r"out holds 'influence-entropy' with other options \(length is 8 there and 9 here\); to have both, give "
        r"yours another name: influence-entropy: \{name: NAME, \.\.\.\}\.",
    ):
        merge_studies(held, made([A], evals=[{"influence-entropy": {"length": 9}}]), Path("out"))
    both = merge_studies(held, made([A], evals=[{"influence-entropy": {"name": "short", "length": 9}}]), Path("out"))
    assert [found.declaration.name for found in plan_evaluations(both)] == ["domain-loss", "influence-entropy", "short"]


def test_a_study_without_evaluations_of_its_own_measures_copying_in_a_directory_that_did_not(made):
    assert made([A]).evals == ("domain-loss", "copying")
    for held in (["domain-loss"], ["domain-loss", {"copying": {"at": "end"}}]):
        assert merge_studies(made([A], evals=held), made([A]), Path("out")).evals == ("domain-loss", "copying")
    alone = made([A], evals=["domain-loss"])
    assert merge_studies(alone, alone, Path("out")).evals == ("domain-loss",)


def test_a_run_stays_itself_when_others_are_added(made):
    alone = {(run.name, run.seed): run.hash for run in plan_runs(made([A]), 256)}
    more = {(run.name, run.seed): run.hash for run in plan_runs(made([A, B], [1, 0]), 256)}
    assert alone.items() < more.items() and len(set(more.values())) == 4


def test_a_recorded_hash_stays_what_it_is(made):
    """As the first versions made it, when the seeds stood among the options of training and there was no eps."""
    run = plan_runs(made([A], [3]), 256)[0]
    train = {
        "tokens": 2560,
        "batch": 8,
        "micro_batch": None,
        "lr": 0.01,
        "final_lr": 0.0,
        "warmup": 1,
        "schedule": "linear",
        "betas": [0.9, 0.95],
        "weight_decay": 0.1,
        "clip": 1.0,
        "precision": "auto",
        "seeds": [3],
        "eval_every": 512,
        "checkpoint_every": None,
        "checkpointing": False,
        "compile": None,
    }
    content = json.dumps(["a", 3, run.model.model_dump(mode="json"), train], sort_keys=True)
    assert run.hash == hashlib.sha256(content.encode()).hexdigest()[:16]
    assert run.hash != plan_runs(made([A], [3], train={"eps": 1e-6}), 256)[0].hash
