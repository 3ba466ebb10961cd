"""Checkpoints on disk: what is none is left alone, what is incomplete is named."""

import errno
import json
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from basecap.errors import CheckpointError
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.plugins import load_plugin
from basecap.records import RunRecords
from basecap.train import checkpoint
from basecap.train.distributed import Processes
from basecap.train.loop import DevicePlacement, Trainer
from basecap.train.optim import build_optimiser
from tests.train.conftest import BATCH, LENGTH, VOCAB, RandomStream, config, save

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
        records, placement = (
            RunRecords(tmp_path / name),
            DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32"),
        )
        options = config(eval_every=4 * BATCH * LENGTH)
        model = LanguageModel(buffered).initialise(0)
        Trainer(model, options, 0, workload=stream, records=records, placement=placement).run(name, evaluate)
        return model, [row["train_loss"] for row in records.metrics()]

    def stop(model, step, tokens):
        if step == 12:
            raise InterruptedError

    straight, losses = train("straight")
    with pytest.raises(InterruptedError):
        train("resumed", stop)
    resumed, again = train("resumed")
    assert again == losses
    loaded = checkpoint.load_stored(checkpoint.latest(tmp_path / "straight" / "resume"))
    for model in (straight, resumed, loaded):
        assert torch.equal(model.blocks[0].mixer.mean, straight.blocks[0].mixer.mean)
        assert model.blocks[0].mixer.turn == 20j


def test_a_buffer_that_a_checkpoint_lacks_is_named(buffered, tmp_path):
    model = LanguageModel(buffered).initialise(0)
    path = save(tmp_path, model, build_optimiser(model, model.recipe(), config()), 8) / "step-8" / "model.safetensors"
    tensors = load_file(path)
    assert "blocks.0.mixer.scratch" not in tensors
    del tensors["blocks.0.mixer.mean"]
    save_file(tensors, path)
    sign(path.parent)
    with pytest.raises(CheckpointError, match=r"another model: blocks\.0\.mixer\.mean is in the model but not"):
        checkpoint.load_stored(path.parent)


def sign(path: Path) -> None:
    """Bring the checksums of a checkpoint up to date, as another version of basecap might have written it."""
    (path / "SHA256SUMS").unlink()
    checkpoint._write_checksums(path)


@pytest.fixture
def saved(model, tmp_path):
    """A directory with the checkpoint of step 8 and directories that are none."""
    for name in ("step-8-backup", "step-", "step-x"):
        (tmp_path / "resume" / name).mkdir(parents=True)
    return save(tmp_path, model, build_optimiser(model, model.recipe(), config()), 8)


def test_directories_of_other_names_are_left_alone(saved):
    assert checkpoint.latest(saved) == saved / "step-8"
    assert (saved / "step-8-backup").is_dir() and (saved / "step-x").is_dir()


class LongStream(RandomStream):
    """Waits at one step, so that what is being written is done by then."""

    def __init__(self, ready, step: int):
        super().__init__()
        self.ready, self.step = ready, step

    def batch(self, seed: int, step: int, *arguments, **options):
        until = time.monotonic() + 10
        while step == self.step and not self.ready() and time.monotonic() < until:
            time.sleep(0.01)
        return super().batch(seed, step, *arguments, **options)


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.safetensors", "optimiser.safetensors", "state.json"])
def test_a_disk_that_is_full_ends_a_run_after_few_steps_and_keeps_the_checkpoint_before(
    model, tmp_path, monkeypatch, name
):
    """A disk across the network says last that it is full; a machine may go down at any time."""
    times = []

    def full(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == name and path.parent.name != "step-4" and checkpoint.latest(records.resume) is not None:
            times.append(name)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("os.fsync", full)
    placement, records = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32"), RunRecords(tmp_path)
    options = config(checkpoint_every=4 * BATCH * LENGTH, tokens=60 * BATCH * LENGTH)
    stream = LongStream(lambda: trainer.layout.failed, 10)
    trainer = Trainer(model, options, 0, workload=stream, records=records, placement=placement)
    with pytest.raises(CheckpointError, match=r"cannot write .*the disk quota is exceeded; free disk space or"):
        trainer.run("test", lambda model, step, tokens: None)
    assert times and [path.name for path in records.resume.iterdir()] == ["step-4"]
    assert 8 < len(records.metrics()) < 12  # the next checkpoint is due at step 12


def test_training_goes_on_while_a_thread_writes_a_checkpoint_of_its_step(stream, tmp_path, monkeypatch):
    options, complete, done = config(eval_every=8 * BATCH * LENGTH, average=0.1, keep="all"), checkpoint.complete, []

    def slow(partial: Path, step: int, *given: object) -> None:
        while step == 8 and not at_once and len(RunRecords(partial.parents[1]).metrics()) < 12:
            time.sleep(0.01)
        done.append(step)
        complete(partial, step, *given)

    monkeypatch.setattr(checkpoint, "complete", slow)
    placement, sums = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32"), []
    for at_once in (False, True):
        model = LanguageModel(model_config("transformer++", hidden=32, vocab=VOCAB, layers=1, max_length=LENGTH))
        records = RunRecords(tmp_path / f"{at_once}")
        trainer = Trainer(model.initialise(0), options, 0, workload=stream, records=records, placement=placement)
        save = trainer._save
        if at_once:
            trainer._save = lambda step, save=save, trainer=trainer: (save(step), trainer._settle())
        trainer.run("test", lambda model, step, tokens: None)
        assert done == [8, 16, 20]
        done.clear()
        written = [
            *(records.resume / f"step-{step}" for step in (16, 20)),
            *checkpoint.stored(records.weights).values(),
        ]
        sums.append([(path / "SHA256SUMS").read_text() for path in written])
    assert sums[0] == sums[1] and len(sums[0]) == 5 and "average" in sums[0][0]


def test_an_error_waits_for_what_is_being_written_and_says_why_it_cannot_be(model, stream, tmp_path, monkeypatch):
    placement, log = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32"), []

    def full(*given: object) -> None:
        time.sleep(0.1)
        raise CheckpointError("cannot write a checkpoint.")

    def fail(model, step, tokens):
        raise RuntimeError("evaluation")

    monkeypatch.setattr(checkpoint, "complete", full)
    trainer = Trainer(model, config(), 0, workload=stream, records=RunRecords(tmp_path), placement=placement)
    with pytest.raises(RuntimeError, match="evaluation"):
        trainer.run("test", fail, log.append)
    assert log == ["test: cannot write a checkpoint."]


def test_an_older_checkpoint_that_cannot_be_removed_costs_nothing(model, tmp_path, monkeypatch):
    optimiser = build_optimiser(model, model.recipe(), config())
    resume = save(tmp_path, model, optimiser, 8)

    def busy(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr("os.rmdir", busy)
    for step in (9, 10):
        save(tmp_path, model, optimiser, step)
    assert (resume / "step-8").is_dir() and checkpoint.latest(resume) == resume / "step-10"
    monkeypatch.undo()
    save(tmp_path, model, optimiser, 11)
    assert sorted(path.name for path in resume.iterdir()) == ["step-10", "step-11"]


def test_a_state_of_impossible_size_is_named(saved):
    path = saved / "step-8" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "model": {**state["model"], "vocab": 10**20}}))
    sign(path.parent)
    with pytest.raises(CheckpointError, match=r"step-8 is unreadable \(state\.json: "):
        checkpoint.stored_config(saved)


@pytest.mark.parametrize("key", ["step", "model", "hidden"])
def test_an_incomplete_state_is_named(saved, model, key):
    path = saved / "step-8" / "state.json"
    state = json.loads(path.read_text())
    (state["model"] if key == "hidden" else state).pop(key)
    path.write_text(json.dumps(state))
    sign(path.parent)
    optimiser = build_optimiser(model, model.recipe(), config())
    for read in (
        lambda: checkpoint.stored_config(saved),
        lambda: checkpoint.restore(saved / "step-8", model, optimiser),
    ):
        with pytest.raises(
            CheckpointError, match=r"step-8 is unreadable \(state\.json: .*; remove .* to train it again"
        ):
            read()


def test_a_state_that_is_no_object_is_named(saved):
    (saved / "step-8" / "state.json").write_text("5")
    sign(saved / "step-8")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        checkpoint.stored_config(saved)


FILES = ("model.safetensors", "optimiser.safetensors", "state.json", "SHA256SUMS")


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_bit, lambda path: path.write_bytes(b""), Path.unlink])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_that_is_said(saved, model, name, damage):
    save(saved.parent, model, build_optimiser(model, model.recipe(), config()), 9)
    log: list[str] = []
    assert checkpoint.intact(saved, log.append) == saved / "step-9" and not log
    damage(saved / "step-9" / name)
    assert checkpoint.intact(saved, log.append) == saved / "step-8"
    assert len(log) == 1 and log[0].startswith(f"checkpoint {saved / 'step-9'} is damaged (")
    assert log[0].endswith("; resuming from step-8.") and "\n" not in log[0]
    with pytest.raises(CheckpointError, match=rf"step-9 is damaged \(.*\); remove {saved / 'step-9'} to use step-8\.$"):
        checkpoint.stored_config(saved)
    damage(saved / "step-8" / name)
    with pytest.raises(
        CheckpointError, match=rf"there is no intact checkpoint; remove {saved.parent} to train it again\.$"
    ):
        checkpoint.intact(saved, log.append)
    assert len(log) == 1


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_to_the_bit(model, stream, tmp_path):
    placement, log = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32"), []
    options = config(checkpoint_every=5 * BATCH * LENGTH)

    def train(records: RunRecords) -> list[float]:
        fresh = LanguageModel(model.config).initialise(0)
        trainer = Trainer(fresh, options, 0, workload=stream, records=records, placement=placement)
        trainer.run("test", lambda model, step, tokens: None, log.append)
        return [row["train_loss"] for row in records.metrics()]

    records = RunRecords(tmp_path)
    losses = train(records)
    assert sorted(path.name for path in records.resume.iterdir()) == ["step-15", "step-20"] and not log
    flip_bit(records.resume / "step-20" / "model.safetensors")
    assert train(records) == losses
    assert log == [
        f"test: checkpoint {records.resume / 'step-20'} is damaged (model.safetensors does not match SHA256SUMS); "
        "resuming from step-15.",
        "test: resumed at step 15 of 20.",
    ]
    assert sorted(path.name for path in records.resume.iterdir()) == ["step-15", "step-20"]


def test_a_checkpoint_of_discarded_steps_goes_when_the_next_is_written(saved, model):
    optimiser = build_optimiser(model, model.recipe(), config())
    for step in (9, 12, 10):
        save(saved.parent, model, optimiser, step)
    found = {path.name for path in saved.iterdir()}
    assert found == {"step-9", "step-10", "step-8-backup", "step-", "step-x"}


def test_what_a_killed_process_left_of_a_checkpoint_goes_with_the_next(saved, model):
    (saved / ".partial-5").mkdir()
    save(saved.parent, model, build_optimiser(model, model.recipe(), config()), 9)
    assert not list(saved.glob(".partial-*"))


def test_what_sha256sum_checks_is_what_is_written(saved):
    done = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=saved / "step-8", capture_output=True, text=True, check=True
    )
    assert done.stdout.count(": OK") == 3
    assert len({path.stat().st_mode for path in (saved / "step-8").iterdir()}) == 1  # who reads one reads all


def test_a_checkpoint_that_another_user_may_not_read_is_not_called_damaged(saved, model, monkeypatch):
    save(saved.parent, model, build_optimiser(model, model.recipe(), config()), 9)

    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "file_digest", refuse)
    words = r"step-9/model\.safetensors cannot be read \(Permission denied\); fix that and run again\.$"
    for read in (checkpoint.stored_config, lambda place: checkpoint.intact(place, print)):
        with pytest.raises(CheckpointError, match=words):
            read(saved)
