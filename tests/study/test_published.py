"""Published numbers in a study file: checked, shown, and in no run."""

from pathlib import Path

import pytest
import yaml

from basecap.errors import ConfigError
from basecap.plan.runs import plan_runs
from basecap.study.config import load_study
from basecap.study.merge import merge_studies

VALUE = {"architecture": "transformer++", "train": "mqar", "test": "mqar-last", "value": 15.44}
TASKS = {
    "name": "tiny recall",
    "task": {"train": ["mqar"], "options": {"vocab": 16}, "cells": [{"length": 8, "pairs": 1}], "examples": 8},
    "model": {"hidden": 16, "layers": 1},
    "train": {"epochs": 1, "batch": 4, "lr": 1e-2},
    "architectures": ["transformer++"],
}
TEXT = {key: value for key, value in TASKS.items() if key != "task"} | {
    "data": {"source": "installed", "train": ["prose"], "ood": []},
    "train": {"tokens": 1000, "batch": 4, "lr": 1e-2},
}


def loaded(tmp_path, content, published):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content if published is None else content | {"published": published}))
    return load_study(str(path))


def test_published_numbers_are_part_of_a_study_and_of_none_of_its_runs(tmp_path):
    published = {"source": "a paper", "values": [VALUE, VALUE | {"length": 8, "pairs": 1}]}
    with_numbers, without = (loaded(tmp_path, TASKS, given) for given in (published, None))
    assert [run.hash for run in plan_runs(with_numbers, 36)] == [run.hash for run in plan_runs(without, 36)]
    assert with_numbers.published.metric == "accuracy" and with_numbers.published.values[0].value == 15.44
    for held, wanted in ((without, with_numbers), (with_numbers, without)):
        assert merge_studies(held, wanted, Path("there")).published == wanted.published


@pytest.mark.parametrize(
    ("content", "published", "words"),
    [
        (TASKS, {"source": "a paper", "values": [VALUE | {"value": 150}]}, "less than or equal to 100"),
        (TASKS, {"source": "a paper", "values": [VALUE | {"test": "mqar-lats"}]}, "did you mean 'mqar-last'?"),
        (TASKS, {"source": "a paper", "values": [VALUE | {"tset": "mqar"}]}, "unknown key 'published.values.0.tset'"),
        (TASKS, {"source": "a paper", "values": [VALUE, VALUE]}, "transformer.., mqar, mqar-last is listed twice"),
        (TASKS, {"values": [VALUE]}, "'published.source' is missing"),
        (TEXT, {"source": "a paper", "values": [VALUE]}, "compared with accuracies on tasks; remove published"),
    ],
    ids=["above 100", "unknown task", "unknown key", "twice", "no source", "text"],
)
def test_what_cannot_be_shown_is_refused(tmp_path, content, published, words):
    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path, content, published)
