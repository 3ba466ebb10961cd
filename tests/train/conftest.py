"""A stream of random tokens and a small model to train on it."""

from pathlib import Path

import pytest
import torch

from basecap.data.workload import Batch, Workload
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train.config import TrainConfig
from basecap.train.copies import Copies
from basecap.train.distributed import Processes

VOCAB, LENGTH, BATCH = 31, 16, 4


class RandomStream(Workload):
    """Batches of noise with a pattern to learn: every second token repeats the one before."""

    vocabulary = VOCAB

    def __init__(self, length: int = LENGTH):
        self.length = length

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        drawn = torch.randint(0, VOCAB, (batch, self.length // 2 + 1), generator=generator)
        rows = drawn.repeat_interleave(2, dim=1)[:, : self.length + 1]
        share = batch // world
        rows = rows[rank * share : (rank + 1) * share]
        return Batch(rows[:, :-1], rows[:, 1:])


class UnevenStream(RandomStream):
    """The same rows; the first ones end early: a batch of four has 1, 2, 8 and 8 targets."""

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        whole, share = super().batch(seed, step, batch), batch // world
        last = torch.tensor([1, 2, 8, 8]).repeat(batch // 4)[:, None]
        targets = torch.where(torch.arange(self.length) < last, whole.targets, -1)
        part = slice(rank * share, (rank + 1) * share)
        return Batch(whole.inputs[part], targets[part])


@pytest.fixture
def stream() -> RandomStream:
    return RandomStream()


@pytest.fixture
def model() -> LanguageModel:
    return LanguageModel(model_config("transformer++", hidden=32, vocab=VOCAB, layers=1, max_length=LENGTH)).initialise(
        0
    )


def config(**changes) -> TrainConfig:
    """Return the options of a run of 20 steps."""
    return TrainConfig(**({"tokens": 20 * BATCH * LENGTH, "batch": BATCH, "lr": 1e-2, "warmup": 2} | changes))


def save(run: Path, model: LanguageModel, optimiser: torch.optim.Optimizer, step: int) -> Path:
    """Write a checkpoint of a run; return the directory of its checkpoints."""
    layout, records = Copies(model, Processes(), compiles=False), RunRecords(run)
    layout.save(records, optimiser, step, None)
    layout.settle()
    return records.resume
