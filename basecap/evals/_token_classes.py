"""Which tokens of a text a copy from the context predicts, see `basecap.records.token_classes`."""

from collections.abc import Sequence

import numpy as np

from basecap.data import PreparedData
from basecap.data.tokenizer import BYTES
from basecap.records.token_classes import CLASSES, COPIED, MISLED, NEW

#: Length of n-grams by default, in bytes of a text of bytes and in other tokens: each about eight characters.
BYTES_NGRAM, NGRAM = 8, 2
#: The largest number of an n-gram before numbers are made small.
LARGEST = 2**62


def ngram_of(asked: int | None, data: PreparedData, length: int) -> int:
    """Return the length of n-grams of windows of `length` tokens: `asked`, or the default for a tokenizer."""
    if asked is not None:
        return asked
    return max(1, min(BYTES_NGRAM if data.vocabulary == BYTES else NGRAM, length - 1))


def token_classes(windows: Sequence[np.ndarray], ngram: int) -> list[np.ndarray]:
    """Return the class of each predicted token as an index into `CLASSES`: int8 [T] for each window [T + 1].

    Windows are integer arrays; the first token of each is context alone.
    """
    sizes = np.array([len(window) for window in windows], np.int64)
    tokens = np.concatenate([np.zeros(0, np.int64), *windows]).astype(np.int64)
    place = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    numbers, base = np.repeat(np.arange(len(windows)), sizes), int(tokens.max(initial=0)) + 1
    numbers = numbers * base + tokens  # equal where window and token are
    for _ in range(ngram - 1):
        numbers = _joined(numbers, tokens, base)
    ended = np.flatnonzero(place >= ngram - 1)
    targets = np.flatnonzero(place >= ngram)
    occurred, followed = np.zeros((2, len(tokens)), bool)
    occurred[ended] = _repeated(numbers[ended])
    followed[targets] = _repeated(_joined(numbers, tokens, base)[targets])
    classes = np.full(len(tokens), CLASSES.index(NEW), np.int8)
    classes[targets[occurred[targets - 1]]] = CLASSES.index(MISLED)
    classes[followed] = CLASSES.index(COPIED)
    return [part[1:] for part in np.split(classes, np.cumsum(sizes)[:-1])] if len(windows) else []


def _joined(numbers: np.ndarray, tokens: np.ndarray, base: int) -> np.ndarray:
    """Return numbers of the n-grams that are one token longer: `numbers` of the one before, and `tokens`."""
    if numbers.max(initial=0) >= LARGEST // base:
        numbers = np.unique(numbers, return_inverse=True)[1]
    return np.concatenate([[0], numbers[:-1]])[: len(tokens)] * base + tokens


def _repeated(numbers: np.ndarray) -> np.ndarray:
    """Return whether each number occurs earlier: bool [N]."""
    order = np.argsort(numbers, kind="stable")
    found = np.zeros(len(numbers), bool)
    found[order[1:]] = numbers[order[1:]] == numbers[order[:-1]]
    return found
