"""Overlap of held-out and training text: the share of each held-out document that also occurs in the training text.

A token of a held-out document is covered when it lies in n consecutive tokens of that document that also occur in the
training text; the share of a document is that of its covered tokens, as in Llama 2 (arXiv 2307.09288, appendix A.6).
n is the number of tokens of 13 words, the length that GPT-3 compares (arXiv 2005.14165, appendix C): BYTES bytes of
the training text, so that the result hardly depends on the vocabulary. A document of fewer than n tokens has share 0.

Sequences are compared by 64-bit hashes. The hashes of the held-out documents are sorted, ROUND at a time; the training
text is read once per round, CHUNK tokens at a time, so that memory depends on the size of neither. A Bloom filter
excludes most training sequences without a search. Threads search side by side, as NumPy releases Python's lock.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from basecap.data.stream import Tokens

#: Bytes of 13 English words with the spaces after them, and the minimum number of tokens to compare.
BYTES, FEWEST = 80, 13

#: Held-out tokens per round, training tokens read at a time.
ROUND, CHUNK = 1 << 22, 1 << 19

#: The most threads: each holds some 30 MB, and more of them would wait for memory.
MOST_THREADS = 8

#: Factor of the polynomial hash; odd, so that multiplication loses no bit.
FACTOR = 0x9E3779B97F4A7C15

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class TextOverlap:
    """How much of the held-out text occurs in the training text, by "domain/split".

    Attributes:
        sequence: n, the number of consecutive tokens compared.
        shares: covered share of the tokens of all held-out documents, from 0 to 1.
        left_out: indices of the documents with a share above `data.overlap`.
    """

    sequence: int
    shares: dict[str, float]
    left_out: dict[str, list[int]]


def sequence_length(tokens: int, size: int) -> int:
    """Return n for training text of `tokens` tokens and `size` bytes.

    >>> sequence_length(tokens=1_000, size=4_000), sequence_length(tokens=1_000, size=1_000)
    (20, 80)
    """
    return max(FEWEST, round(BYTES * tokens / max(1, size)))


def rounds(sizes: np.ndarray) -> int:
    """Return how often `covered_shares` reads the training text for documents of these sizes."""
    return sum(1 for _ in _rounds(sizes))


def covered_shares(
    sizes: np.ndarray,
    document: Callable[[int], np.ndarray],
    training: Sequence[Tokens],
    n: int,
    advance: Callable[[int], None] = lambda tokens: None,
    threads: int = 1,
) -> np.ndarray:
    """Return the covered share of each document's tokens.

    Args:
        sizes: tokens of each held-out document; int64 [documents].
        document: returns the tokens of a document, [tokens], for its index.
        training: runs of training tokens; sequences do not cross from one run to the next.
        n: length of the compared sequences.
        advance: called with the number of training tokens read since the last call.
        threads: that search the training text; at most MOST_THREADS do.

    Returns:
        float64 [documents], from 0 to 1.
    """
    shares = np.zeros(len(sizes))
    for first, last in _rounds(sizes):
        hashes = [_hashes(document(index), n) for index in range(first, last)]
        found = _occurring(training, np.concatenate([np.zeros(0, np.uint64), *hashes]), n, advance, threads)
        starts = np.split(found, np.cumsum([len(some) for some in hashes])[:-1])
        for index, begins in enumerate(starts, first):
            if len(begins):
                shares[index] = np.convolve(begins, np.ones(n, np.int64)).astype(bool).mean()
    return shares


def _rounds(sizes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last + 1) of documents with at most ROUND tokens together, or of a single longer one."""
    first, held = 0, 0
    for index, size in enumerate(sizes):
        if held and held + size > ROUND:
            yield first, index
            first, held = index, 0
        held += size
    if held:
        yield first, len(sizes)


def _occurring(
    training: Sequence[Tokens], wanted: np.ndarray, n: int, advance: Callable[[int], None], threads: int
) -> np.ndarray:
    """Return which of the hashes `wanted` [sequences] occur in the training text: bool [sequences]."""
    known, places = np.unique(wanted, return_inverse=True)
    if not len(known):
        return np.zeros(0, bool)
    bits = (16 * len(known) - 1).bit_length()
    high, low = np.uint64(64 - bits), np.uint64((1 << bits) - 1)
    table = np.zeros(1 << bits, bool)  # a Bloom filter: both bits of a known hash are set
    table[known >> high] = table[known & low] = True

    def search(chunk: tuple[Tokens, int]) -> tuple[int, np.ndarray]:
        """Return the size of a chunk, and the places in `known` of its sequences."""
        run, start = chunk
        hashes = _hashes(run[start : start + CHUNK + n - 1], n)
        hashes = hashes[table[(hashes >> high).view(np.int64)]]  # NumPy is slower with unsigned indices
        hashes = hashes[table[(hashes & low).view(np.int64)]]
        hashes.sort()  # so that searches one after the other read the same memory
        at = np.searchsorted(known, hashes).clip(max=len(known) - 1)
        return min(CHUNK, len(run) - start), at[known[at] == hashes]

    seen = np.zeros(len(known), bool)
    chunks = ((run, start) for run in training for start in range(0, len(run) - n + 1, CHUNK))
    for size, at in _in_threads(search, chunks, min(threads, MOST_THREADS)):
        seen[at] = True
        advance(size)
    return seen[places]


def _in_threads(work: Callable[[Given], Made], items: Iterable[Given], threads: int) -> Iterator[Made]:
    """Yield what `work` returns for each of `items`, which are read as threads need them."""
    with ThreadPoolExecutor(threads) as pool:
        started: deque[Future[Made]] = deque()
        for item in items:
            started.append(pool.submit(work, item))
            if len(started) > threads:
                yield started.popleft().result()
        yield from (future.result() for future in started)


def _hashes(tokens: np.ndarray, n: int) -> np.ndarray:
    """Return a hash of every n consecutive tokens: uint64 [max(0, tokens - n + 1)].

    The hash of a sequence is a polynomial of the hashes of its tokens, modulo 2**64. The hash of a + b tokens follows
    from those of a and b tokens, so log2(n) passes over the text are enough.
    """
    if len(tokens) < n:
        return np.zeros(0, np.uint64)
    block, size = _scattered(tokens), 1
    whole, length = np.zeros(len(tokens) + 1, np.uint64), 0
    while True:
        if n & size:
            whole = whole[: len(whole) - size] * _power(size) + block[length : length + len(whole) - size]
            length += size
        if length == n:
            return whole
        block = block[: len(block) - size] * _power(size) + block[size:]
        size *= 2


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(FACTOR, exponent, 1 << 64))


def _scattered(tokens: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each token (splitmix64, Steele et al. 2014): uint64 [tokens]."""
    bits = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(FACTOR)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))
