"""The text of a study: joined with the study that it extends, at one of its scales."""

from pathlib import Path

import pytest
import yaml

from basecap.errors import ConfigError
from basecap.study.config import StudyConfig, load_study
from basecap.study.merge import merge_studies

BASE = {
    "name": "base",
    "summary": "of the base alone",
    "data": {"source": "installed", "seq_len": 32, "train": ["prose", "python"], "weights": {"prose": 1, "python": 2}},
    "model": {"hidden": 32, "layers": 2},
    "train": {"tokens": "2e3", "batch": 4},
    "architectures": ["transformer++", "mamba-2"],
    "scales": {"test": {"model": {"hidden": 16}, "train": {"tokens": 512}}, "laptop": {"seeds": [0, 1]}},
}


def write(tmp_path: Path, name: str, content: dict) -> str:
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def extending(tmp_path: Path, content: dict) -> str:
    write(tmp_path, "base", BASE)
    return write(tmp_path, "more", {"name": "more", "extends": "base.yaml", **content})


def test_sections_are_joined_key_by_key_and_lists_replaced(tmp_path):
    above = {
        "train": {"tokens": 4096},
        "architectures": ["transformer++"],
        "scales": {"test": {"model": {"layers": 1}}},
    }
    path = extending(tmp_path, above)
    study = load_study(path)
    assert (study.name, study.summary, study.scale) == ("more", "", "paper")
    assert (study.train.tokens, study.train.batch, study.model.hidden) == (4096, 4, 32)
    assert [entry.name for entry in study.architectures] == ["transformer++"]
    small = load_study(path, scale="test")
    assert (small.model.hidden, small.model.layers, small.train.tokens) == (16, 1, 512)
    assert load_study(path, scale="laptop").seeds == (0, 1)
    assert load_study(path, ["model.hidden=8"], "test").model.hidden == 8, "--set comes after the scale"


def test_a_study_at_a_scale_reads_back_as_itself_and_runs_in_a_directory_of_its_own(tmp_path):
    path = write(tmp_path, "base", BASE)
    paper, small = load_study(path), load_study(path, scale="test")
    assert (paper.directory, small.directory) == (Path("runs/base"), Path("runs/base-test"))
    assert (paper.title, small.title) == ("base at scale paper", "base at scale test")
    own = extending(tmp_path, {"name": "own"})
    assert [load_study(own, scale=scale).title for scale in (None, "test")] == ["own", "own at scale test"]
    held = write(tmp_path, "resolved", small.model_dump(mode="json"))
    assert load_study(held) == load_study(held, scale="test") == small
    with pytest.raises(ConfigError, match=r"is of scale 'test' and no scale 'paper'; leave out --scale"):
        load_study(held, scale="paper")
    assert load_study(write(tmp_path, "small", BASE | {"scale": "test"})) == small
    assert StudyConfig.model_validate(paper.model_dump(mode="json")) == paper


def test_a_directory_is_of_one_scale(tmp_path):
    path = write(tmp_path, "base", BASE)
    held, wanted = load_study(path, scale="laptop"), load_study(path, scale="test")
    with pytest.raises(
        ConfigError, match=r"runs holds base at scale laptop, not base at scale test; give another --out"
    ):
        merge_studies(held, wanted, Path("runs"))
    assert merge_studies(held, held, Path("runs")) == held


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"extends": "more.yaml"}, r"extend each other in a circle: \S+more\.yaml extends \S+more\.yaml; remove one"),
        ({"extends": "bases.yaml"}, r"study file \S+bases\.yaml does not exist"),
        ({"extends": "quikstart"}, r"more\.yaml: extends: unknown study 'quikstart': did you mean 'quickstart'"),
        ({"extends": ["a", "b"]}, "extends should be the name or file of one study"),
        ({"scales": 3}, "scales should be a section"),
        ({"scales": {"test": [1]}}, r"scales\.test should be a section"),
        ({"scales": {"": {}}}, "'' is not a valid name of a scale"),
        ({"scales": {"paper": {}}}, r"scales\.paper is the file itself"),
        ({"scales": {"test": {"name": "x"}}}, r"a scale cannot change name; remove scales\.test\.name"),
        ({"scales": {"test": {"model": {"hidden": 0}}}}, r"more\.yaml at scale test: model\.hidden = 0: should be"),
        ({"scales": {"test": {"train": {"token": 1}}}}, r"at scale test: unknown key 'train\.token': did you mean"),
        (
            {"scales": {"gpu": {"data": {"pth": "x"}}}},
            r"at scale gpu: unknown key 'data\.pth': did you mean 'data\.path'",
        ),
        ({"scale": "labtop"}, r"has no scale 'labtop': did you mean 'laptop'"),
        ({"extend": "base"}, r"unknown key 'extend': did you mean 'extends'"),
        ({"summary": 1}, r"more\.yaml at scale test: summary = 1"),
    ],
)
def test_what_cannot_be_joined_is_refused_in_one_sentence(tmp_path, content, words):
    with pytest.raises(ConfigError, match=words) as refused:
        load_study(extending(tmp_path, content), scale=None if "scale" in content else "test")
    assert "\n" not in str(refused.value)


def test_circles_are_found_by_way_of_other_studies(tmp_path):
    first = write(tmp_path, "first", {"extends": "second.yaml"})
    write(tmp_path, "second", {"extends": "first.yaml"})
    with pytest.raises(ConfigError, match=r"first\.yaml extends \S+second\.yaml extends \S+first\.yaml; remove one"):
        load_study(first)


def test_unknown_scales_are_refused(tmp_path):
    path = write(tmp_path, "base", BASE)
    with pytest.raises(ConfigError, match=r"base\.yaml has no scale 'tset': did you mean 'test'\?"):
        load_study(path, scale="tset")
    with pytest.raises(ConfigError, match="study quickstart has one size and no scale 'test'; leave out --scale"):
        load_study("quickstart", scale="test")
    for setting in ("scale=test", "extends=quickstart", "scales={}"):
        with pytest.raises(ConfigError, match=r"--set cannot change .*; choose a scale with --scale"):
            load_study(path, [setting])


TASKS = {
    "name": "tasks",
    "task": {"train": ["mqar"], "test": ["mqar", "mqar-last"], "shifts": {"mqar": ["mqar-last"]}, "examples": 10},
    "model": {"hidden": 16, "layers": 1},
    "train": {"epochs": 1, "batch": 2},
    "reference": "mamba-2",
    "architectures": ["mamba-2"],
}


@pytest.mark.parametrize(
    ("place", "shifts", "words"),
    [
        (
            "file",
            {"mqar": ["mqar-shuffle"]},
            r"tasks\.yaml: task\.shifts has 'mqar-shuffle', .* not in task\.test; add it",
        ),
        ("file", {"mqar-last": ["mqar"]}, "task.shifts has 'mqar-last', which is not in task.train"),
        ("scale", {"mqar": ["mqar-shuffle"]}, r"scales\.test: task\.shifts has 'mqar-shuffle'"),
        ("set", {"mqar": ["mqar-shuffle"]}, r"--set task\.shifts=.*: task\.shifts has 'mqar-shuffle'"),
        ("set", {"mqar": "mqar-shuffle"}, r"task\.shifts\.mqar = 'mqar-shuffle': should be a list"),
    ],
)
def test_shifts_of_tasks_that_are_not_tested_are_refused_where_they_are_set(tmp_path, place, shifts, words):
    task = {**TASKS["task"], **({"shifts": shifts} if place == "file" else {})}
    scales = {"test": {"task": {"shifts": shifts} if place == "scale" else {}}}
    path = write(tmp_path, "tasks", {**TASKS, "task": task, "scales": scales})
    settings = [f"task.shifts={yaml.safe_dump(shifts, default_flow_style=True).strip()}"] if place == "set" else []
    with pytest.raises(ConfigError, match=words):
        load_study(path, settings, "test")


def test_shifts_of_tasks_that_are_left_out_above_are_ignored(tmp_path):
    fewer = {"task": {"test": ["mqar"]}}
    path = write(tmp_path, "tasks", {**TASKS, "scales": {"test": fewer}})
    extended = write(tmp_path, "more", {"name": "more", "extends": "tasks.yaml", **fewer})
    set_ = load_study(path, ["task.test=[mqar]"])
    held = write(tmp_path, "study", {"schema": 1, **set_.model_dump(mode="json")})  # as a directory has it
    for study in (load_study(path, scale="test"), load_study(extended), set_, load_study(held)):
        assert study.task.tested == ("mqar",) and study.task.shifts == {"mqar": ("mqar-last",)}
