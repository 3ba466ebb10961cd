"""The training loop: it learns, it accumulates, it resumes exactly, it stops at a loss that is not finite."""

from functools import partial
from pathlib import Path

import pytest
import torch

from basecap.data.workload import Batch
from basecap.errors import CheckpointError, ConfigError, TrainingError
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train import checkpoint
from basecap.train.config import Timetable, TrainConfig
from basecap.train.diagnose import first_bad_module
from basecap.train.distributed import Processes
from basecap.train.loop import DevicePlacement, Trainer
from basecap.train.optim import clip_gradients
from tests.train.conftest import BATCH, LENGTH, RandomStream, UnevenStream, config

PLACEMENT = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32")


def fresh(model: LanguageModel) -> LanguageModel:
    return LanguageModel(model.config).initialise(0)


def train(model, stream, path: Path, options: TrainConfig, evaluate=lambda model, step, tokens: None) -> RunRecords:
    records = RunRecords(path)
    Trainer(model, options, 0, workload=stream, records=records, placement=PLACEMENT).run("test", evaluate)
    return records


def curve(records: RunRecords) -> list[tuple[int, float, float]]:
    return [(row["step"], row["train_loss"], row["grad_norm"]) for row in records.metrics()]


def test_it_learns_and_records_every_step(model, stream, tmp_path):
    rows = train(model, stream, tmp_path, config()).metrics()
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[-1]["tokens"] == 20 * BATCH * LENGTH
    assert rows[-1]["train_loss"] < 0.9 * rows[0]["train_loss"]
    assert set(rows[0]) == {"step", "tokens", "train_loss", "lr", "grad_norm", "tokens_per_s", "seconds"}


@pytest.mark.parametrize("micro_batch", [1, 2, None])
def test_loss_and_gradients_are_those_of_the_mean_over_all_targets(model, tmp_path, micro_batch):
    batch = UnevenStream().batch(0, 0, BATCH)
    nats = [model.token_losses(row.inputs, row.targets).sum() for row in batch.split(1)]
    trainer = Trainer(
        model,
        config(micro_batch=micro_batch, clip=1e9),
        0,
        workload=UnevenStream(),
        records=RunRecords(tmp_path),
        placement=PLACEMENT,
    )
    (loss,), _ = trainer._gradients(batch)
    torch.testing.assert_close(loss, sum(nats) / (1 + 2 + 8 + 8))
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row in batch.split(1):
        (model(row.inputs, row.targets) * int((row.targets >= 0).sum()) / 19).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


def test_a_micro_batch_without_targets_adds_nothing(model, tmp_path):
    batch = UnevenStream().batch(0, 0, BATCH)
    batch.targets[:2] = -1
    options, records = config(micro_batch=2), RunRecords(tmp_path)
    trainer = Trainer(model, options, 0, workload=UnevenStream(), records=records, placement=PLACEMENT)
    torch.testing.assert_close(trainer._gradients(batch)[0][0], model(batch.inputs[2:], batch.targets[2:]).detach())


def test_resume_is_exact_to_the_bit(model, stream, tmp_path):
    options = config(checkpoint_every=7 * BATCH * LENGTH, eval_every=5 * BATCH * LENGTH)
    straight = train(fresh(model), stream, tmp_path / "straight", options)

    class Killed(Exception):
        pass

    def stop(model: LanguageModel, step: int, tokens: int) -> None:
        if step == 15:
            raise Killed

    with pytest.raises(Killed):
        train(fresh(model), stream, tmp_path / "resumed", options, stop)
    assert len(curve(RunRecords(tmp_path / "resumed"))) == 15
    seen = []
    resumed = train(fresh(model), stream, tmp_path / "resumed", options, lambda model, step, tokens: seen.append(step))
    assert seen == [15, 20]  # the checkpoint of step 14 is kept; later steps are repeated
    assert curve(resumed) == curve(straight)
    a, b = (checkpoint.load_stored(checkpoint.latest(records.resume)) for records in (straight, resumed))
    for (name, one), other in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_evaluations_see_no_dropout_and_training_does(model, stream, tmp_path):
    """A user's mixer may drop out: its losses would be compared with losses of mixers without dropout."""
    modes = {True: [], False: []}
    model.blocks[0].mixer.register_forward_hook(lambda mixer, inputs, output: modes[mixer.training].append(mixer))
    tokens = stream.batch(0, 0, BATCH).parts

    def evaluate(model: LanguageModel, step: int, tokens_done: int) -> None:
        model.token_losses(*tokens)

    records = train(model, stream, tmp_path, config(eval_every=5 * BATCH * LENGTH), evaluate)
    assert (len(modes[True]), len(modes[False])) == (20, 4)
    assert not checkpoint.load_stored(checkpoint.latest(records.resume)).training


def test_a_finished_run_does_nothing(model, stream, tmp_path):
    first = curve(train(fresh(model), stream, tmp_path, config()))
    assert curve(train(fresh(model), stream, tmp_path, config())) == first


def test_evaluations_follow_the_tokens(model, stream, tmp_path):
    seen = []
    options = config(eval_every=6 * BATCH * LENGTH)
    train(model, stream, tmp_path, options, lambda model, step, tokens: seen.append((step, tokens)))
    assert [step for step, _ in seen] == [6, 12, 18, 20]
    assert all(tokens == step * BATCH * LENGTH for step, tokens in seen)
    assert Timetable(options, LENGTH).evaluations == 4


def test_a_loss_that_is_not_finite_names_the_module(model, stream, tmp_path):
    with torch.no_grad():
        model.blocks[0].mixer.out.weight[0, 0] = torch.inf
    with pytest.raises(TrainingError, match=r"step 1.*blocks\.0\.mixer\.out\.weight"):
        train(model, stream, tmp_path, config())


def test_overflow_in_the_forward_pass_names_the_first_module(model, stream, tmp_path):
    with torch.no_grad():
        model.blocks[0].feed_forward.up.weight.fill_(3e38)
    with pytest.raises(TrainingError, match=r"module blocks\.0\.feed_forward\.up"):
        train(model, stream, tmp_path, config())


class LastRowStream(RandomStream):
    """Token 30 in the last row of a batch alone."""

    def batch(self, seed, step, batch, rank=0, world=1):
        rows = torch.tensor([[30 if row + 1 == batch else 1] * LENGTH for row in range(batch)])
        return Batch(rows, rows)


class MixedStream(RandomStream):
    """Rows of a quarter of the longest length, four times as many."""

    def batch(self, seed, step, batch, rank=0, world=1):
        whole = super().batch(seed, step, batch, rank, world)
        return Batch(*(part.reshape(-1, self.length // 4) for part in whole.parts))


def test_micro_batches_of_short_sequences_hold_as_many_tokens(model, tmp_path):
    shapes = []
    model.embedding.register_forward_hook(lambda module, inputs, x: shapes.append(tuple(inputs[0].shape)))
    train(model, MixedStream(), tmp_path, config(tokens=BATCH * LENGTH, micro_batch=2))
    assert shapes == [(8, LENGTH // 4)] * 2


def test_what_is_bad_is_looked_for_in_every_micro_batch(model, tmp_path):
    model.embedding.register_forward_hook(lambda module, inputs, x: x * torch.nan if (inputs[0] == 30).any() else x)
    with pytest.raises(TrainingError, match="the loss stopped being finite at step 1; first bad: module embedding"):
        train(model, LastRowStream(), tmp_path, config(micro_batch=1))


def test_a_block_whose_last_sum_overflows_is_named(model):
    large = torch.finfo(torch.float32).max
    torch.nn.init.constant_(model.embedding.weight, large)
    model.blocks[0].mixer.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    model.blocks[0].feed_forward.register_forward_hook(lambda module, inputs, output: torch.full_like(output, large))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert first_bad_module(model, tokens, tokens) == "module blocks.0"


def test_a_module_whose_output_is_taken_in_parts_is_named():
    model = LanguageModel(model_config("mamba-2", hidden=32, vocab=31, layers=1, max_length=8)).initialise(0)
    torch.nn.init.constant_(model.blocks[0].mixer.in_proj.weight, 3e38)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert first_bad_module(model, tokens, tokens) == "module blocks.0.mixer.in_proj"


def test_gradients_are_called_bad_where_the_loss_is_finite(model, stream, tmp_path):
    model.embedding.weight.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(TrainingError, match="the gradients stopped being finite at step 1; first bad: the backward"):
        train(model, stream, tmp_path, config())


def test_a_bad_module_that_is_not_found_again_is_not_invented(model, stream, tmp_path):
    calls = []
    spoiled = lambda module, inputs, x: calls.append(x) or (x * torch.nan if len(calls) == 1 else x)  # noqa: E731
    model.embedding.register_forward_hook(spoiled)
    with pytest.raises(TrainingError, match="first bad: not found in any module when the forward passes of this"):
        train(model, stream, tmp_path, config())


@pytest.mark.parametrize(
    ("found", "words"),
    [([None, "module norm"], "module norm in process 1"), ([None] * 2, "not found in any module of any process")],
)
def test_what_is_bad_may_be_in_another_process(model, stream, tmp_path, monkeypatch, found, words):
    monkeypatch.setattr(Processes, "run_on_all", lambda group, action: [action(), *found[1:]])
    trainer = Trainer(model, config(), 0, workload=stream, records=RunRecords(tmp_path), placement=PLACEMENT)
    with pytest.raises(TrainingError, match=f"first bad: {words}"):
        trainer._refuse(0, stream.batch(0, 0, BATCH), "loss")


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpoint.stored_config(tmp_path / "nothing")


@pytest.mark.parametrize(("changes", "word"), [({"micro_batch": 3}, "micro_batch"), ({"batch": 3}, "processes")])
def test_batches_that_do_not_divide_are_refused(model, stream, tmp_path, changes, word):
    placement = DevicePlacement.choose(
        torch.device("cpu"), Processes(rank=0, world=2 if word == "processes" else 1), "fp32"
    )
    with pytest.raises(ConfigError, match=word):
        Trainer(model, config(**changes), 0, workload=stream, records=RunRecords(tmp_path), placement=placement)


def test_bf16_trains_with_fp32_weights(model, stream, tmp_path):
    placement = DevicePlacement.choose(torch.device("cpu"), Processes(), "bf16")
    trainer = Trainer(model, config(), 0, workload=stream, records=RunRecords(tmp_path), placement=placement)
    trainer.run("test", lambda model, step, tokens: None)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    rows = RunRecords(tmp_path).metrics()
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_gradients_are_limited_together_or_each(model):
    for by in ("norm", "value"):
        for number, parameter in enumerate(model.parameters(), start=1):
            parameter.grad = torch.full_like(parameter, -number)
        before = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        torch.testing.assert_close(clip_gradients(model, config(clip=0.5, clip_by=by)), before)
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert (gradients.norm() <= 0.501) if by == "norm" else (gradients == -0.5).all()


def test_a_compiled_model_meets_more_lengths_than_pytorch_keeps_versions_of(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("basecap.models._compiler._sharing", [])  # of models that other tests compiled
    with torch._dynamo.config.patch(recompile_limit=2):  # of 8 by default, each of which takes a while to compile
        model.compile_training()
        torch._dynamo.utils.counters.clear()
        for length in range(4, 7):
            tokens = torch.zeros(1, length, dtype=torch.int64)
            model(tokens, tokens).backward()
    assert torch._dynamo.utils.counters["frames"]["ok"] == 2 * 3  # a block and the loss, for each length
