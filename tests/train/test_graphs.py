"""CUDA graphs of training steps: the numbers of a step without one, and nothing in it that a graph would freeze."""

import pytest
import torch

from basecap.data.workload import Batch
from basecap.errors import ConfigError, TrainingError
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.train import graphs
from basecap.train.config import TrainConfig
from basecap.train.distributed import Processes
from basecap.train.graphs import GraphedStep
from basecap.train.loop import DevicePlacement, Trainer
from tests._architectures import distinct_names
from tests.train._graphs import KINDS, STEP, RecordedPool, read_back, small, trainer_of
from tests.train.conftest import BATCH, UnevenStream, config


class VaryingStream(UnevenStream):
    """Batches whose rows with few targets stand elsewhere in each step."""

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        return Batch(*(part.roll(step, 0) for part in super().batch(seed, step, batch).parts))


class MixedStream(VaryingStream):
    """Batches of two lengths in turn; the short ones have twice the rows."""

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        if step % 2 == 0:
            return super().batch(seed, step, batch)
        return VaryingStream(self.length // 2).batch(seed, step, 2 * batch)


def prepared(path, wanted: bool | str, name: str = "transformer++", stream=None, **options) -> Trainer:
    """Return a trainer with recorded graphs, or none, whose updates are the fused ones of a GPU."""
    trainer = trainer_of(small(name), path, stream=stream or VaryingStream(), **({"tokens": 8 * STEP} | options))
    for group in trainer.optimiser.param_groups:
        group.update({"fused": True} if "fused" in group else {})
    if wanted:
        trainer.graphs = GraphedStep(trainer.step, insist=wanted is True, pool=RecordedPool)
        trainer.step = trainer.graphs
    return trainer


def trained(trainer: Trainer, evaluate=lambda model, step, tokens: None) -> list:
    """Train to the end; return losses, norms and rates, and the weights and the optimiser's state."""
    trainer.run("test", evaluate)
    rows = [(row["train_loss"], row["grad_norm"], row["lr"]) for row in trainer.records.metrics()]
    weights = [*trainer.model.parameters()]
    states = [trainer.optimiser.state[weight] for weight in weights]
    tensors = weights + [state[key] for state in states for key in sorted(state)]
    return [rows, [tensor.detach().clone() for tensor in tensors]]


OPTIONS = {
    "one pass": {},
    "micro-batches, average": {"micro_batch": 2, "average": 0.1},
    "clipped by value": {"clip_by": "value", "clip": 1e-3},
    "muon": {"optimiser": "muon"},
    "branches": {"schedule": "wsd", "branches": (6 * STEP,)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_with_graphs_is_the_run_without_to_the_bit(options: dict, tmp_path):
    without = trained(prepared(tmp_path / "without", False, **options))
    trainer = prepared(tmp_path / "with", "auto", **options)
    assert trainer.graphs.record is None
    torch.testing.assert_close(trained(trainer), without, rtol=0, atol=0)
    assert trainer.graphs.record == ("gradients" if "optimiser" in options else "step")


def test_each_shape_has_ordinary_steps_and_then_graphs(tmp_path, monkeypatch: pytest.MonkeyPatch):
    without = trained(prepared(tmp_path / "without", False, stream=MixedStream()))
    monkeypatch.setattr(RecordedPool, "captures", 0)
    trainer = prepared(tmp_path / "with", True, stream=MixedStream())
    launched, taken = trainer.graphs._step, []
    monkeypatch.setattr(launched, "update", lambda: taken.append(launched.optimiser.step()))
    torch.testing.assert_close(trained(trainer), without, rtol=0, atol=0)
    assert RecordedPool.captures == 4  # gradients and update of two shapes
    assert len(taken) == 3 + 3 + 2  # three steps of each shape, and the captures of its update


@pytest.mark.parametrize("name", KINDS[1:])
def test_graphs_of_every_kind_of_mixer_freeze_no_number(name: str, tmp_path):
    without = trained(prepared(tmp_path / "without", False, name, tokens=5 * STEP))
    found = trained(prepared(tmp_path / "with", True, name, tokens=5 * STEP))
    torch.testing.assert_close(found, without, rtol=0, atol=0)


def test_a_resumed_run_is_exact(tmp_path):
    options = {"tokens": 11 * STEP, "checkpoint_every": 5 * STEP, "eval_every": 3 * STEP}
    straight = trained(prepared(tmp_path / "straight", False, **options))

    def stop(model, step, tokens):
        if step == 6:
            raise KeyError

    with pytest.raises(KeyError):
        trained(prepared(tmp_path / "resumed", "auto", **options), stop)
    resumed = prepared(tmp_path / "resumed", "auto", **options)
    torch.testing.assert_close(trained(resumed), straight, rtol=0, atol=0)
    assert resumed.graphs.record == "step"


def test_a_step_that_reads_numbers_back_goes_on_without_graphs_and_says_so_once(tmp_path):
    def with_reading(path, wanted):
        trainer = prepared(tmp_path / path, wanted)
        trainer.model.blocks[0].mixer.register_forward_hook(read_back)
        return trainer

    trainer, words = with_reading("auto", "auto"), []
    trainer.run("test", lambda model, step, tokens: None, words.append)
    reason = "operation not permitted when stream is capturing"
    assert [line for line in words if "graphs" in line] == [f"test: steps are not CUDA graphs: {reason}."]
    assert trainer.graphs.record == f"none: {reason}"
    plain = with_reading("plain", False)
    assert [row["train_loss"] for row in trainer.records.metrics()] == [row[0] for row in trained(plain)[0]]
    with pytest.raises(ConfigError, match=rf"\({reason}\); set train.cuda_graphs=false"):
        trained(with_reading("true", True))


@pytest.mark.parametrize(("taken", "record"), [(500, "step"), (501, "none: a step takes")])
def test_graphs_leave_half_of_the_memory(taken: int, record: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RecordedPool, "taken", taken)
    trainer = prepared(tmp_path, "auto")
    trained(trainer)
    assert trainer.graphs.record.startswith(record)


def test_lack_of_memory_in_a_capture_is_no_fault_of_the_step(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self, run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(RecordedPool, "capture", refuse)
    trainer = prepared(tmp_path / "auto", "auto")
    assert len(trained(trainer)[0]) == 8 and trainer.graphs.record == "none: out of memory"
    with pytest.raises(torch.OutOfMemoryError):
        trained(prepared(tmp_path / "true", True))


def test_a_loss_that_is_not_finite_changes_no_weight_and_names_the_module(tmp_path):
    trainer = prepared(tmp_path, True)
    scale = torch.ones(())
    trainer.model.blocks[0].mixer.register_forward_hook(lambda module, given, output: output * scale)
    before = trained(trainer)[1]
    scale.fill_(torch.inf)
    with pytest.raises(TrainingError, match=r"first bad: module blocks\.0\.mixer\."):
        trainer._step(8, UnevenStream().batch(0, 8, BATCH))
    after = [*trainer.model.parameters()]
    torch.testing.assert_close(after, before[: len(after)], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("value", "device", "world", "asked"),
    [("auto", "cuda", 1, True), (True, "cuda", 1, True), (False, "cuda", 1, False), ("auto", "cpu", 1, False),
     ("auto", "cuda", 2, False)],
)  # fmt: skip
def test_where_graphs_are_asked_for(value, device, world, asked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "GraphedStep", lambda step, **given: given["insist"])
    placement = DevicePlacement(device=torch.device(device), processes=Processes(world=world), bf16=False)
    found = graphs.graphed(None, config(cuda_graphs=value), placement)
    assert found == ((value is True) if asked else None)


def test_the_option_is_auto_true_or_false():
    with pytest.raises(ValueError, match="should be auto, true or false"):
        TrainConfig(tokens=1, cuda_graphs="always")
    assert TrainConfig(tokens=1, cuda_graphs="auto").cuda_graphs == "auto"


@pytest.mark.parametrize("name", distinct_names())
def test_no_training_step_reads_numbers_back(name: str):
    with torch.device("meta"):  # whose tensors have no numbers
        model = LanguageModel(model_config(name, hidden=32, vocab=31, layers=2, max_length=64))
        tokens = torch.zeros((2, 16), dtype=torch.int64)
        model(tokens, tokens).backward()
        assert model.embedding.weight.grad is not None
