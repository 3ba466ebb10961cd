"""Random numbers of examples, each a pure function of (key, index of the example, name of the stream, position).

The generator is counter-based: SplitMix64 (Steele, Lea and Flood, 2014) applied to a counter, so that an example does
not depend on others. Draws without replacement repeat only the draws that hit a taken value. This treats all values
equally, so the result is uniform over all choices of distinct values.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bits = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

#: A range with fewer values than this many times the draws is permuted instead, because redrawing would take long.
_DENSE = 4


def key_of(*parts: object) -> int:
    """Return a 64-bit hash of the text of `parts`."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def mixed(bits: Bits) -> Bits:
    """Apply SplitMix64's finaliser, a bijection of 64-bit words, in place."""
    bits ^= bits >> np.uint64(30)
    bits *= _FIRST
    bits ^= bits >> np.uint64(27)
    bits *= _SECOND
    bits ^= bits >> np.uint64(31)
    return bits


def first_of_each(codes: Ints) -> NDArray[np.bool_]:
    """Return [N, P]: whether each code, from 0 to 2**40 - 1, is the first of its value in its row."""
    count = codes.shape[1]
    places = np.uint64((count - 1).bit_length())
    packed = np.sort((codes.astype(np.uint64) << places) | np.arange(count, dtype=np.uint64), axis=1)
    first = np.ones(codes.shape, dtype=bool)
    repeated = packed[:, 1:] >> places == packed[:, :-1] >> places
    rows, columns = np.nonzero(repeated)
    first[rows, (packed[rows, columns + 1] & ((np.uint64(1) << places) - np.uint64(1))).astype(np.int64)] = False
    return first


class ExampleDraws:
    """The random numbers of N examples. Streams with different names are independent."""

    def __init__(self, key: int, indices: Ints):
        """Take the key of the task and seed, and the indices of the examples: int64 [N], at least 0."""
        self._rows = mixed(indices.astype(np.uint64) * _GOLDEN + np.uint64(key))
        self.size = len(indices)

    def bits(self, stream: str, count: int) -> Bits:
        """Return `count` random 64-bit words per example: uint64 [N, count]."""
        return mixed(self._starts(stream)[:, None] + np.arange(count, dtype=np.uint64) * _GOLDEN)

    def below_of(self, stream: str, codes: Ints, size: int) -> Ints:
        """Return a number of range(size) for each code [N, P], the same for equal codes of an example: [N, P]."""
        return _scaled(mixed(self._starts(stream)[:, None] + codes.astype(np.uint64) * _GOLDEN), size)

    def _starts(self, stream: str) -> Bits:
        return mixed(self._rows ^ np.uint64(key_of(stream)))

    def _bits_at(self, stream: str, rows: Ints, places: Ints) -> Bits:
        """Return the elements [rows, places] of `bits` of a stream."""
        return mixed(self._starts(stream)[rows] + places.astype(np.uint64) * _GOLDEN)

    def below(self, stream: str, count: int, size: int) -> Ints:
        """Return numbers uniform on range(size), size at most 2**31: int64 [N, count]."""
        return _scaled(self.bits(stream, count), size)

    def uniform(self, stream: str, count: int) -> NDArray[np.float64]:
        """Return numbers uniform on (0, 1): float64 [N, count]."""
        return _fractions(self.bits(stream, count))

    def distinct(self, stream: str, count: int, size: int) -> Ints:
        """Return distinct numbers of range(size) per example, in random order: int64 [N, count <= size]."""
        return self.distinct_words(stream, count, size, 1)[:, :, 0]

    def distinct_words(self, stream: str, count: int, size: int, width: int) -> Ints:
        """Return distinct words of `width` numbers of range(size) per example: int64 [N, count, width]."""
        if size**width < _DENSE * count:
            codes = self.slots(stream, count, size**width)
            return codes[:, :, None] // size ** np.arange(width) % size
        words = self.below(stream, count * width, size).reshape(self.size, count, width)
        again = np.arange(self.size)
        attempt = 0
        while True:
            rows, places = _repeated(words[again], size)
            if not len(rows):
                return words
            attempt += 1
            again, rows = np.unique(again[rows]), again[rows]
            for part in range(width):
                bits = self._bits_at(f"{stream} {attempt}", rows, places * width + part)
                words[rows, places, part] = _scaled(bits, size)

    def slots(self, stream: str, count: int, size: int, weights: NDArray[np.float64] | None = None) -> Ints:
        """Return distinct slots of range(size), drawn without replacement: int64 [N, count].

        `weights` [size] are the relative probabilities of the slots in every draw, by default equal. The arrival time
        of a slot is exponential with its weight as rate, and slots are taken in order of arrival (Efraimidis and
        Spirakis, 2006).
        """
        times = self.bits(stream, size)
        if weights is not None:
            # positive floats have the same order as their bits
            times = (-np.log(_fractions(times)) / weights).view(np.uint64)
        low = np.uint64((size - 1).bit_length())
        numbered = (times >> low << low) | np.arange(size, dtype=np.uint64)
        numbered.sort(axis=1)
        return (numbered[:, :count] & ((np.uint64(1) << low) - np.uint64(1))).astype(np.int64)

    def tokens(self, stream: str, count: int, low: int, high: int, avoid: Ints | None = None) -> Ints:
        """Return tokens uniform on [low, high), without those in the example's row of `avoid`: int64 [N, count].

        `avoid` is int64 [N, P] and must leave at least one token of the range in every row.
        """
        tokens = self.below(stream, count, high - low)
        tokens += low
        if avoid is None:
            return tokens
        taken = np.zeros((self.size, max(high, int(avoid.max()) + 1)), dtype=bool)
        np.put_along_axis(taken, avoid, True, axis=1)
        numbers = np.arange(self.size)[:, None]
        rows, places = np.nonzero(taken[numbers, tokens])
        attempt = 0
        while len(rows):
            attempt += 1
            drawn = _scaled(self._bits_at(f"{stream} {attempt}", rows, places), high - low) + low
            tokens[rows, places] = drawn
            still = taken[rows, drawn]
            rows, places = rows[still], places[still]
        return tokens


def _scaled(bits: Bits, size: int) -> Ints:
    """Scale the upper halves of `bits` to range(size)."""
    bits = bits >> np.uint64(32)
    bits *= np.uint64(size)
    bits >>= np.uint64(32)
    return bits.view(np.int64)


def _fractions(bits: Bits) -> NDArray[np.float64]:
    fractions = (bits >> np.uint64(11)).astype(np.float64)
    fractions += 0.5
    fractions *= 2.0**-53
    return fractions


def _repeated(words: Ints, size: int) -> tuple[Ints, Ints]:
    """Return rows and places of words [N, P, W] that repeat an earlier word of their row, by 40-bit fingerprints.

    A collision of fingerprints (probability 2**-40) only causes an unnecessary redraw.
    """
    prints = words[:, :, 0].astype(np.uint64)
    for part in range(1, words.shape[2]):
        prints = mixed(prints * np.uint64(size)) + words[:, :, part].astype(np.uint64)
    codes = (mixed(prints) >> np.uint64(24)).astype(np.int64)
    rows, places = np.nonzero(~first_of_each(codes))
    return rows, places
