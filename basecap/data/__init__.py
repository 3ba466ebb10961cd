"""Text to tokens to batches: sources, tokenizers, shards, the training stream."""

from basecap.data.config import DataConfig
from basecap.data.preparation import prepare
from basecap.data.prepared import DocumentSet, PreparedData, inspect
from basecap.data.stream import TrainStream
from basecap.data.tokenizer import Tokenizer, check_vocabulary

__all__ = [
    "DataConfig",
    "DocumentSet",
    "PreparedData",
    "Tokenizer",
    "TrainStream",
    "check_vocabulary",
    "inspect",
    "prepare",
]
