"""Checkpoints on disk: what is none is left alone, what is incomplete is named."""

import json

import pytest

from basecap.errors import CheckpointError
from basecap.train import checkpoint
from basecap.train.optim import build_optimiser
from tests.train.conftest import config


@pytest.fixture
def saved(model, tmp_path):
    """A directory with the checkpoint of step 8 and directories that are none."""
    for name in ("step-8-backup", "step-", "step-x"):
        (tmp_path / name).mkdir()
    checkpoint.save(tmp_path, model, build_optimiser(model, model.recipe(), config()), 8)
    return tmp_path


def test_directories_of_other_names_are_left_alone(saved):
    assert checkpoint.latest(saved) == saved / "step-8"
    assert (saved / "step-8-backup").is_dir() and (saved / "step-x").is_dir()


@pytest.mark.parametrize("key", ["step", "model", "hidden"])
def test_an_incomplete_state_is_named(saved, model, key):
    path = saved / "step-8" / "state.json"
    state = json.loads(path.read_text())
    (state["model"] if key == "hidden" else state).pop(key)
    path.write_text(json.dumps(state))
    optimiser = build_optimiser(model, model.recipe(), config())
    for read in (lambda: checkpoint.load_model(saved), lambda: checkpoint.restore(saved / "step-8", model, optimiser)):
        with pytest.raises(CheckpointError, match=r"step-8 is unreadable \(state\.json: .*; remove that directory"):
            read()


def test_a_state_that_is_no_object_is_named(saved):
    (saved / "step-8" / "state.json").write_text("5")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        checkpoint.load_model(saved)
