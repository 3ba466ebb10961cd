"""Text to tokens to batches: sources, tokenizers, token shards, training stream."""

from basecap.data.baseline import bigram_loss
from basecap.data.config import DataConfig
from basecap.data.preparation import check_inputs, find_prepared, missing_inputs, prepare, remote_inputs
from basecap.data.prepared import DocumentSet, PreparedData, inspect
from basecap.data.stream import TrainStream
from basecap.data.tokenizer import Tokenizer, check_vocabulary, known_tokenizer

__all__ = [
    "DataConfig",
    "DocumentSet",
    "PreparedData",
    "Tokenizer",
    "TrainStream",
    "bigram_loss",
    "check_inputs",
    "check_vocabulary",
    "find_prepared",
    "inspect",
    "known_tokenizer",
    "missing_inputs",
    "prepare",
    "remote_inputs",
]
