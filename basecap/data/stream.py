"""Training batches as a pure function of (seed, step).

All documents of a pool of domains, each followed by end-of-text, form a ring of N tokens. Each epoch cuts the ring,
from a random point, into N // T windows of T inputs and their targets, and visits them in random order. Point and order
are computed from hashes when needed: there is no state to save, and large texts are not slower.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from basecap.data.workload import share_of
from basecap.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

#: Numbers of rows in which the mixture of weighted domains may have its shares; the first that is exact enough is used.
ROUNDS = tuple(10**power for power in range(3, 10))

#: Largest relative error of a domain's share.
EXACTNESS = 0.01


class Tokens(Protocol):
    """Tokens that can be sliced: an array or a run of tokens on disk."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class TrainStream:
    """The training tokens of a study."""

    def __init__(self, domains: Mapping[str, Sequence[Tokens]], weights: Mapping[str, float] | None = None):
        """Take token arrays by domain and each domain's share of a batch (default: proportional to its tokens).

        Raises DataError for a share that is too small for any of `ROUNDS`.
        """
        if weights is None:
            pools, shares = [[array for arrays in domains.values() for array in arrays]], [1.0]
        else:
            pools, shares = [list(arrays) for arrays in domains.values()], [weights[name] for name in domains]
        self._rings = [_Ring(arrays) for arrays in pools]
        self._bounds = _bounds(shares)
        self._round = int(self._bounds[-1])

    @property
    def tokens(self) -> int:
        """Number of training tokens, including end-of-text tokens."""
        return sum(ring.size for ring in self._rings)

    def batch(self, seed: int, step: int, batch: int, seq_len: int, rank: int = 0, world: int = 1) -> "Tensor":
        """Return int64 [batch / world, seq_len + 1], a pure function of its arguments.

        The rows of all ranks, concatenated, are the batch of a single process. Raises ConfigError when `batch` is not
        divisible by `world`, DataError when `seq_len` is longer than the text.
        """
        import torch  # here, because processes that prepare text import this module and do not need torch

        share = share_of(batch, world)
        first = step * batch + rank * share
        return torch.from_numpy(np.stack([self._row(seed, row, seq_len) for row in range(first, first + share)]))

    def opening(self, rows: int, seq_len: int) -> np.ndarray:
        """Return the first rows of seed 0, int64 [rows, seq_len + 1], in any order: a whole text takes one read."""
        if len(self._rings) == 1 and rows == self.tokens // seq_len:
            return self._rings[0].epoch(seq_len)
        return self.batch(0, 0, rows, seq_len).numpy()

    def _row(self, seed: int, row: int, seq_len: int) -> np.ndarray:
        turn, place = divmod(row, self._round)
        place = permuted(place, self._round, seed, turn) if len(self._rings) > 1 else place
        pool = int(np.searchsorted(self._bounds, place, side="right")) - 1
        start, stop = self._bounds[pool], self._bounds[pool + 1]
        ordinal = turn * int(stop - start) + place - int(start)
        return self._rings[pool].window(ordinal, seq_len, seed, pool)


class _Ring:
    """Token arrays joined to a ring."""

    def __init__(self, arrays: Sequence[Tokens]):
        self._arrays = [array for array in arrays if len(array)]
        self._starts = np.cumsum([0, *(len(array) for array in self._arrays)])
        self.size = int(self._starts[-1])

    def window(self, ordinal: int, seq_len: int, seed: int, pool: int) -> np.ndarray:
        """Return window number `ordinal`, counted over all epochs: int64 [seq_len + 1]."""
        windows = self.size // seq_len
        if not windows:
            raise DataError(
                f"seq_len {seq_len} is longer than the training text of {self.size} tokens; lower data.seq_len."
            )
        epoch, index = divmod(ordinal, windows)
        offset = _keyed(seed, epoch, pool, 0) % self.size
        start = offset + seq_len * permuted(index, windows, seed, epoch, pool)
        return self._read(start % self.size, seq_len + 1)

    def epoch(self, seq_len: int) -> np.ndarray:
        """Return the windows of the first epoch of seed 0 in the order of the text: int64 [windows, seq_len + 1]."""
        text = self._read(_keyed(0, 0, 0, 0) % self.size, self.size // seq_len * seq_len + 1)
        return np.lib.stride_tricks.sliding_window_view(text, seq_len + 1)[::seq_len]

    def _read(self, start: int, count: int) -> np.ndarray:
        pieces = []
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        start -= int(self._starts[index])
        while count:
            piece = self._arrays[index][start : start + count]
            pieces.append(piece)
            count -= len(piece)
            index, start = (index + 1) % len(self._arrays), 0
        return np.concatenate(pieces).astype(np.int64)


def _bounds(shares: Sequence[float]) -> np.ndarray:
    """Return the first row of each pool in a round, then the number of rows: int64 [pools + 1], strictly ascending."""
    wanted = np.array(shares) / np.sum(shares)
    for rows in ROUNDS:
        bounds = np.concatenate([[0], np.round(np.cumsum(wanted) * rows)]).astype(np.int64)
        if (np.abs(np.diff(bounds) / rows - wanted) <= EXACTNESS * wanted).all():
            return bounds
    raise DataError(
        f"the smallest of data.weights is {wanted.min():.1g} of their sum, too little to be honoured; raise it."
    )


def permuted(index: int, size: int, *key: int) -> int:
    """Return the image of `index` under a keyed permutation of range(size).

    A Feistel network of six rounds (Luby and Rackoff, 1988) permutes range(4**n), the smallest that contains the range.
    It is applied until the result lies in the range, which restricts it to the range (Black and Rogaway, 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(6):
            left, right = right, left ^ (_keyed(*key, number, right) & mask)
        index = left << half | right
        if index < size:
            return index


def _keyed(*values: int) -> int:
    """Return a 64-bit hash of integers."""
    return int.from_bytes(hashlib.blake2b(struct.pack(f"<{len(values)}q", *values), digest_size=8).digest(), "little")
