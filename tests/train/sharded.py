"""Trains with a part of each weight in each of two processes, beside the same with a copy in each."""

import contextlib
from pathlib import Path

import torch

from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train.distributed import Processes, processes
from basecap.train.loop import DevicePlacement, Trainer
from tests.train.conftest import BATCH, LENGTH, VOCAB, UnevenStream, config

#: Steps after which each of three commands stops.
STOPS = (3, 6, None)


class Stopped(Exception):
    """Ends a command after a checkpoint, as a kill would."""


def train(path: Path, group: Processes, stop: int | None, **options: object) -> Trainer:
    """Train a model with uneven batches and two micro-batches, up to a step after a checkpoint."""
    step = BATCH * LENGTH
    chosen = config(micro_batch=1, average=0.1, checkpoint_every=step, eval_every=5 * step, tokens=10 * step)
    model = LanguageModel(
        model_config("transformer++ ngram", hidden=32, vocab=VOCAB, layers=2, max_length=LENGTH),
        checkpointing="selective",
    )
    placement = DevicePlacement.choose(torch.device("cpu"), group, "fp32")
    trainer = Trainer(
        model.initialise(0),
        chosen.model_copy(update=options),
        0,
        workload=UnevenStream(),
        records=RunRecords(path),
        placement=placement,
    )
    save = trainer._save

    def save_and_stop(done: int) -> None:
        save(done)
        if done == stop:
            trainer.layout.settle()
            raise Stopped

    trainer._save = save_and_stop
    losses: list[float] = []

    def evaluate(model: LanguageModel, step: int, tokens: int) -> None:
        batch = UnevenStream().batch(1, step, BATCH)
        losses.append(float(model.token_losses(batch.inputs, batch.targets).sum()))

    with contextlib.suppress(Stopped):
        trainer.run("sharded", evaluate, print)
    if group.is_leader:
        with (path / "evaluated").open("a") as file:
            file.writelines(f"{loss}\n" for loss in losses)
    return trainer


def main(path: Path) -> None:
    """Train one model together with the other process."""
    with processes(torch.device("cpu")) as group:
        train(path / "ddp", group, None)
        train(path / "fsdp", group, None, parallel="fsdp")
        train(path / "hybrid", group, None, parallel="fsdp", shard=1)
        train(path / "fewer", group, STOPS[0], parallel="fsdp")


def again(path: Path) -> None:
    """Finish what one process went on with."""
    with processes(torch.device("cpu")) as group:
        train(path / "fewer", group, STOPS[2], parallel="fsdp")
