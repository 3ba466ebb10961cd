"""Trains a few steps; `torchrun` starts it twice. Usage: two_processes.py DIRECTORY."""

import sys
from pathlib import Path

import torch

from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train.distributed import processes
from basecap.train.loop import Place, Trainer
from tests.train.conftest import LENGTH, VOCAB, UnevenStream, config


def main(path: Path) -> None:
    """Train one model together with the other processes."""
    torch.set_num_threads(1)
    with processes(torch.device("cpu")) as group:
        train(path, Place.choose(torch.device("cpu"), group, "fp32"))


def train(path: Path, place: Place) -> None:
    """Train, and let go of the wrapped model before the processes part: gloo may hang otherwise."""
    model = LanguageModel(model_config("transformer++", hidden=32, vocab=VOCAB, layers=1, max_length=LENGTH))
    options = config(micro_batch=1)
    trainer = Trainer(model.initialise(0), options, 0, stream=UnevenStream(), records=RunRecords(path), place=place)
    trainer.run("two", lambda model, step, tokens: None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
