"""Prompts of RULER's task S-NIAH: a number is hidden in a long text and asked for (arXiv 2404.06654).

Two programs make them in different ways, and both ways are here, up to the last random draw: NVIDIA/RULER at c3f5e3b
(scripts/data/synthetic/niah.py) and lm-evaluation-harness 0.4.13 (niah_single_1, asked alone). A prompt is an
introduction, equal lines with the needle before one of them, and a question:

1. `Words` are the names of needles, adjectives and nouns of the package wonderwords.
2. `_draw` draws the name, the number and the line of one needle.
3. `Prompts` finds the number of lines that fits the length, whose trials use up draws too (`_ruler_lines`,
   `_harness_lines`), and then draws the samples (`_sample`), each with fewer lines where it does not fit.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from itertools import accumulate
from random import Random
from typing import Literal, overload

import numpy as np

from basecap.data.tokenizer import Tokenizer
from basecap.errors import ConfigError, DataError

Dialect = Literal["ruler", "harness"]

#: Seeds of the random draws where a study sets none: NVIDIA/RULER's, and that of lm_eval's `simple_evaluate`.
SEEDS: dict[Dialect, int] = {"ruler": 42, "harness": 0}
#: Lines that are taken away where a prompt is too long, from 4,096 tokens on and below.
STEP, SHORT_STEP, LONG = 25, 5, 4096

LACKS = "passkey needs the word list of wonderwords; pip install 'basecap[eval]', or remove passkey."

_LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards."
)
_NEEDLE = "One of the special magic numbers for {name} is: {number}."
_QUESTION = "What is the special magic number for {name} mentioned in the provided text?"
_ANSWER = " The special magic number for {name} mentioned in the provided text is"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, the number that is hidden in it, and how far from its beginning: the share of lines before it."""

    tokens: np.ndarray
    number: str
    depth: float


class Words(Sequence[str]):
    """Every ADJECTIVE-NOUN once, sorted, without a list of all six million."""

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]):
        """Take the words, in any order."""
        self._nouns = sorted({*nouns})
        # One adjective may begin with another and a hyphen, so that the names of both stand in one order.
        groups: list[list[str]] = []
        for start in sorted({f"{adjective}-" for adjective in adjectives}):
            if groups and start.startswith(groups[-1][0]):
                groups[-1].append(start)
            else:
                groups.append([start])
        self._starts = [group[0] for group in groups]
        self._mixed = {
            index: sorted({start + noun for start in group for noun in self._nouns})
            for index, group in enumerate(groups)
            if len(group) > 1
        }
        sizes = (len(self._mixed.get(index, self._nouns)) for index in range(len(groups)))
        self._ends = np.array([*accumulate(sizes)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def longest(self) -> str:
        """The name with the most characters."""
        return max(self._starts, key=len) + max(self._nouns, key=len)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        group = int(np.searchsorted(self._ends, index, side="right"))
        place = index - (int(self._ends[group - 1]) if group else 0)
        return self._mixed[group][place] if group in self._mixed else self._starts[group] + self._nouns[place]


def has_words() -> bool:
    """Whether the word list is installed."""
    return find_spec("wonderwords") is not None


@cache
def words() -> Words:
    """Return the names of needles; raises ConfigError without wonderwords."""
    if not has_words():
        raise ConfigError(LACKS)
    texts = [(files("wonderwords") / "assets" / f"{kind}list.txt").read_text() for kind in ("adjective", "noun")]
    return Words(*([word.rstrip() for word in text.splitlines()] for text in texts))


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """How prompts are made.

    Attributes:
        dialect: of which program they are. The harness does not count the beginning of the answer that ends a prompt.
        tokenizer: what encodes them.
        answer: tokens of the answer, which count as part of the length.
        depths: the n-th sample has its needle in the (n mod depths)-th of so many equal parts; None: anywhere.
    """

    dialect: Dialect
    tokenizer: Tokenizer
    answer: int
    depths: int | None = None
    _known: dict[str, np.ndarray] = field(default_factory=dict, init=False)

    def of_lengths(self, lengths: Sequence[int], count: int, seed: int) -> Iterator[list[Sample]]:
        """Yield `count` samples of at most each length; raises DataError where not even a short one fits.

        RULER draws anew for each length. The harness goes on, so that samples depend on the lengths before theirs.
        """
        random, is_ruler = Random(seed), self.dialect == "ruler"
        for length in lengths:
            if is_ruler:
                random = Random(seed)
            lines = (self._ruler_lines if is_ruler else self._harness_lines)(length, random)
            yield [self._sample(length, lines, index, random) for index in range(count)]

    def longest(self, length: int) -> int:
        """Return how many tokens a prompt and its answer may have."""
        beginning = _ANSWER.format(name=words().longest)
        return length if self.dialect == "ruler" else length + len(self.tokenizer.encode(beginning))

    def refuse_short(self, length: int) -> None:
        """Raise DataError if not even a short prompt and its answer fit `length` tokens."""
        self._sample(length, _step(length), 0, Random(0))

    def _sample(self, length: int, lines: int, index: int, random: Random) -> Sample:
        """Return the sample of a number; raises DataError if it is too long with the fewest lines."""
        while True:
            name, number, place = _draw(lines, random)
            if self.depths is not None:
                part = index % self.depths
                low, high = (-(-edge * lines // self.depths) for edge in (part, part + 1))
                place = low + place * (high - low) // lines
            text = _text(name, number, place, lines)
            size = self._size(text, name)
            if size + self.answer <= length:
                tokens = self._encode(text + _ANSWER.format(name=name))
                return Sample(tokens=tokens, number=number, depth=place / lines)
            if lines <= _step(length):
                raise DataError(
                    f"passkey: with this tokenizer a prompt of {lines} lines has {size:,} tokens, so that with an "
                    f"answer of {self.answer} it is longer than {length:,}; raise lengths, or lower answer."
                )
            lines -= _step(length)

    def _size(self, text: str, name: str) -> int:
        """Return the tokens of a prompt that count."""
        counted = text + _ANSWER.format(name=name) if self.dialect == "ruler" else text
        return len(self._encode(counted))

    def _encode(self, text: str) -> np.ndarray:
        return self.tokenizer.encode_repeated(text, self._known)

    def _ruler_lines(self, length: int, random: Random) -> int:
        """Return the largest number of lines that fits, by bisection."""

        def size(lines: int) -> int:
            name, number, place = _draw(lines, random)
            return self._size(_text(name, number, place, lines), name)

        found = step = _step(length)
        low, high = step, max(int(length / (size(step) / step) * 3), 2 * step)
        while low <= high:
            middle = (low + high) // 2
            if size(middle) + self.answer <= length:
                found, low = middle, middle + 1
            else:
                high = middle - 1
        return found

    def _harness_lines(self, length: int, random: Random) -> int:
        """Return the largest multiple of a step that fits, counted up; the number after the prompt is counted too."""
        lines = step = _step(length)
        size = 0
        while size + self.answer < length:
            name, number, place = _draw(lines, random)
            size = self._size(_text(name, number, place, lines) + number, name)
            lines += step if size + self.answer <= length else -step
        return max(lines, 1)


def _step(length: int) -> int:
    """Return how many lines are taken away where a prompt of at most `length` tokens is too long."""
    return STEP if length >= LONG else SHORT_STEP


def _draw(lines: int, random: Random) -> tuple[str, str, int]:
    """Return the name and the number of a needle, and the line before which it stands."""
    name, number = random.choice(words()), str(random.randint(10**6, 10**7 - 1))
    place = random.sample(range(lines), 1)[0]
    random.sample(range(1), 1)  # which of the names is asked for
    return name, number, place


def _text(name: str, number: str, place: int, lines: int) -> str:
    """Return a prompt up to its question."""
    needle = _NEEDLE.format(name=name, number=number)
    haystack = [_LINE] * place + [needle] + [_LINE] * (lines - place)
    return "\n".join([_INTRODUCTION, *haystack, _QUESTION.format(name=name)])


def fingerprint(samples: Sequence[Sample]) -> str:
    """Return the first sixteen hex digits of a hash of prompts and answers."""
    found = hashlib.sha256()
    for sample in samples:
        found.update(sample.tokens.astype("<u4").tobytes() + sample.number.encode())
    return found.hexdigest()[:16]


def source() -> str:
    """Return where the words are from."""
    return f"words of wonderwords {version('wonderwords')}"
