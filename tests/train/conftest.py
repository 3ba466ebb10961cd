"""A stream of random tokens and a small model to train on it."""

import pytest
import torch
from torch import Tensor

from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.train.config import TrainConfig

VOCAB, LENGTH, BATCH = 31, 16, 4


class RandomStream:
    """Batches of noise with a pattern to learn: every second token repeats the one before."""

    def batch(self, seed: int, step: int, batch: int, seq_len: int, rank: int = 0, world: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        drawn = torch.randint(0, VOCAB, (batch, seq_len // 2 + 1), generator=generator)
        rows = drawn.repeat_interleave(2, dim=1)[:, : seq_len + 1]
        share = batch // world
        return rows[rank * share : (rank + 1) * share]


class UnevenStream(RandomStream):
    """The same rows, of which the first ones end early: a batch of four has 1, 2, 8 and 8 targets."""

    def batch(self, seed: int, step: int, batch: int, seq_len: int, rank: int = 0, world: int = 1) -> Tensor:
        rows = super().batch(seed, step, batch, seq_len)
        last = torch.tensor([1, 2, 8, 8]).repeat(batch // 4)[:, None]
        share = batch // world
        return torch.where(torch.arange(seq_len + 1) <= last, rows, -1)[rank * share : (rank + 1) * share]


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
