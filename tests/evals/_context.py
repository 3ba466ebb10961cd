"""What an evaluation is given: a small model, and a context whose text is two made-up domains."""

import contextlib
from pathlib import Path

import torch

from basecap.data import DataConfig, prepare
from basecap.evals import Context
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.small_study import write_text

LENGTH = 48


def make_context(place: Path) -> Context:
    """Write and prepare the text in `place`."""
    config = DataConfig(
        source="text",
        path=str(write_text(place / "text", documents=60, words=40)),
        tokenizer="bytes",
        seq_len=LENGTH,
        train=("prose",),
        ood=("code",),
        workers=1,
    )
    data = prepare(config, place / "cache")
    return Context(data=data, device=torch.device("cpu"), autocast=contextlib.nullcontext)


def make_model(context: Context) -> LanguageModel:
    """Return an untrained model of one layer that reads the context's tokens."""
    vocab = context.data.tokenizer.vocab_size
    config = model_config("transformer++", hidden=16, vocab=vocab, layers=1, max_length=LENGTH)
    return LanguageModel(config).initialise(0)
