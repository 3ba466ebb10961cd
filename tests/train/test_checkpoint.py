"""Checkpoints on disk: what is none is left alone, what is incomplete is named."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from basecap.errors import BasecapError, CheckpointError
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.registry import load_plugin
from basecap.train import checkpoint
from basecap.train.distributed import Processes
from basecap.train.loop import Place, Trainer
from basecap.train.optim import build_optimiser
from tests.train.conftest import BATCH, LENGTH, VOCAB, config

BUFFERED = """
import torch
from basecap.mixers import Cache, Mixer, mixer

@mixer("buffered", backbone="transformer++", paper="none", summary="adds the mean of what it has seen")
class Buffered(Mixer):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.register_buffer("mean", torch.zeros(layer.hidden, 2)[:, 0])  # a view, which safetensors refuses
        self.register_buffer("turn", torch.zeros(1, dtype=torch.complex128))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x, segments=None):
        if torch.is_grad_enabled():
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
            self.turn += 1j
        return x + self.mean

    def init_cache(self, batch, max_length):
        return Cache(tensors={})

    def step(self, x, cache):
        return x + self.mean

    def flops(self, length):
        return 0.0

    def state_bytes(self, length):
        return 0
"""


@pytest.fixture(scope="session")
def buffered(tmp_path_factory):
    """The options of a model whose mixer has buffers."""
    plugin = tmp_path_factory.mktemp("plugin") / "buffered.py"
    plugin.write_text(BUFFERED)
    load_plugin(plugin)
    return model_config("buffered", hidden=16, vocab=VOCAB, layers=1, max_length=LENGTH)


def test_persistent_buffers_are_resumed_to_the_bit(buffered, stream, tmp_path):
    def train(name, evaluate=lambda model, step, tokens: None):
        records, place = RunRecords(tmp_path / name), Place.choose(torch.device("cpu"), Processes(), "fp32")
        options = config(eval_every=4 * BATCH * LENGTH)
        model = LanguageModel(buffered).initialise(0)
        Trainer(model, options, 0, stream=stream, records=records, place=place).run(name, evaluate)
        return model, [row["train_loss"] for row in records.metrics()]

    def stop(model, step, tokens):
        if step == 12:
            raise InterruptedError

    straight, losses = train("straight")
    with pytest.raises(InterruptedError):
        train("resumed", stop)
    resumed, again = train("resumed")
    assert again == losses
    loaded = checkpoint.load_model(tmp_path / "straight" / "checkpoints")
    for model in (straight, resumed, loaded):
        assert torch.equal(model.blocks[0].mixer.mean, straight.blocks[0].mixer.mean)
        assert model.blocks[0].mixer.turn == 20j


def test_a_buffer_that_a_checkpoint_lacks_is_named(buffered, tmp_path):
    model = LanguageModel(buffered).initialise(0)
    checkpoint.save(tmp_path, model, build_optimiser(model, model.recipe(), config()), 8)
    path = tmp_path / "step-8" / "model.safetensors"
    tensors = load_file(path)
    assert "blocks.0.mixer.scratch" not in tensors
    del tensors["blocks.0.mixer.mean"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"another model: blocks\.0\.mixer\.mean is in the model but not"):
        checkpoint.load_model(tmp_path)


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


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.safetensors", "optimiser.safetensors", "state.json"])
def test_no_checkpoint_goes_before_the_disk_holds_the_next_and_what_stands_behind_it(
    model, stream, tmp_path, monkeypatch, name
):
    """A disk across the network says last that it is full; a machine may go down at any time."""
    place, options = Place.choose(torch.device("cpu"), Processes(), "fp32"), config(checkpoint_every=8 * BATCH * LENGTH)
    times = []

    def full(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == name and path.parent.name != "step-8":
            times.append(name)
            if checkpoint.latest(tmp_path / "checkpoints") is not None:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("os.fsync", full)
    trainer = Trainer(model, options, 0, stream=stream, records=RunRecords(tmp_path), place=place)
    with pytest.raises(BasecapError, match=r"cannot write .*Disk quota exceeded"):
        trainer.run("test", lambda model, step, tokens: None)
    assert times and [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-8"]


def test_an_older_checkpoint_that_cannot_be_removed_costs_nothing(model, tmp_path, monkeypatch):
    optimiser = build_optimiser(model, model.recipe(), config())
    checkpoint.save(tmp_path, model, optimiser, 8)

    def busy(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr("os.rmdir", busy)
    checkpoint.save(tmp_path, model, optimiser, 9)
    assert (tmp_path / "step-8").is_dir() and checkpoint.latest(tmp_path) == tmp_path / "step-9"
    monkeypatch.undo()
    checkpoint.save(tmp_path, model, optimiser, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_a_state_of_impossible_size_is_named(saved):
    path = saved / "step-8" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "model": {**state["model"], "vocab": 10**20}}))
    with pytest.raises(CheckpointError, match=r"step-8 is unreadable \(state\.json: "):
        checkpoint.load_model(saved)


@pytest.mark.parametrize("key", ["step", "model", "hidden"])
def test_an_incomplete_state_is_named(saved, model, key):
    path = saved / "step-8" / "state.json"
    state = json.loads(path.read_text())
    (state["model"] if key == "hidden" else state).pop(key)
    path.write_text(json.dumps(state))
    optimiser = build_optimiser(model, model.recipe(), config())
    for read in (lambda: checkpoint.load_model(saved), lambda: checkpoint.restore(saved / "step-8", model, optimiser)):
        with pytest.raises(
            CheckpointError, match=r"step-8 is unreadable \(state\.json: .*; remove .* to train it again"
        ):
            read()


def test_a_state_that_is_no_object_is_named(saved):
    (saved / "step-8" / "state.json").write_text("5")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        checkpoint.load_model(saved)
