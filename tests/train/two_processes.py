"""Trains a few steps in two processes, is interrupted by a signal to one of them and resumes."""

import os
import signal
from pathlib import Path

import torch

from basecap.data.workload import Batch
from basecap.errors import Interrupted
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train.distributed import processes
from basecap.train.interruption import deferred, listening
from basecap.train.loop import DevicePlacement, Trainer
from tests.train.conftest import LENGTH, VOCAB, UnevenStream, config


class InterruptedStream(UnevenStream):
    """Sends SIGTERM to the second process at step 7, once."""

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        if step == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(seed, step, batch, rank, world)


def main(path: Path) -> None:
    """Train one model together with the other process."""
    with processes(torch.device("cpu")) as group:
        placement = DevicePlacement.choose(torch.device("cpu"), group, "fp32")
        try:
            train(path, InterruptedStream(), placement)
        except Interrupted as interrupted:
            assert interrupted.number == signal.SIGTERM, interrupted
            assert (group.rank == 0) == ("stopped at step 7 of 20 with a checkpoint" in str(interrupted)), interrupted
            train(path, UnevenStream(), placement)


def train(path: Path, stream: UnevenStream, placement: DevicePlacement) -> None:
    """Train, and let go of the wrapped model before the processes part: gloo may hang otherwise."""
    model = LanguageModel(model_config("transformer++", hidden=32, vocab=VOCAB, layers=1, max_length=LENGTH))
    options, records = config(micro_batch=1), RunRecords(path)
    with listening(), deferred():
        trainer = Trainer(model.initialise(0), options, 0, workload=stream, records=records, placement=placement)
        trainer.run("two", lambda model, step, tokens: None, print)
