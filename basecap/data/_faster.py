"""Encoding with gigatoken, an optional library that is many times as fast as `tokenizers`."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain

import numpy as np

#: Characters of each document that are compared, and of all.
LENGTH, CHARACTERS = 4_000, 200_000

#: Texts that tokenizers cut in different ways, compared beside the documents.
ODD = (
    "", " ", "  \n\n\t x  ", "don't I'LL we've it\u2019s", "1234567890 3.14 1,000", "a" * 300, " " * 300 + "x",
    "e\u0301\u0323 \ufb01 \u1e9b\u0323 \u2460", "\u200b\u00a0\u3000\u2028\ufeff", "\x00\x01\x7f\x80", "\ufffd",
    "\u4e2d\u6587\uff0c\u6d4b\u8bd5 \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22 \u0639\u0631\u0628\u064a",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600", "def f(x):\n    return x**2  # \u00b2\r\n",
    "\\begin{a}_{i}^{2}\\alpha$$", "__init__ <a href='b'>&amp;</a>", "\u2581a \u2581",
)  # fmt: skip


@lru_cache(maxsize=2)  # it cannot be pickled, so it is no attribute of a tokenizer, which is passed to other processes
def encoder(description: str) -> Callable[[str], np.ndarray] | None:
    """Return what encodes a text to uint32 [tokens], None if gigatoken is missing or cannot use a tokenizer.json."""
    try:
        import gigatoken
    except ImportError:
        return None
    try:
        return gigatoken.Tokenizer.from_json(description).encode
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # it reads byte-level and SentencePiece BPE; a panic is no Exception
        return None


def first_difference(
    one: Callable[[str], np.ndarray], other: Callable[[str], np.ndarray], texts: Iterable[str]
) -> str | None:
    """Return the first of ODD and the beginnings of `texts` that two encoders encode differently, None without one.

    Reads `texts` until CHARACTERS have been compared.
    """
    left = CHARACTERS
    for text in chain(ODD, texts):
        beginning = text[:LENGTH]
        if not np.array_equal(one(beginning), other(beginning)):
            return beginning
        left -= len(beginning)
        if left <= 0:
            break
    return None
