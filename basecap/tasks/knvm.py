"""Recall of keys of n tokens and values of m tokens with separators: the n-gram tasks KnVm.

Defined by arXiv 2410.15678, sections 3.3 and 3.4 and appendix B.3 and B.4. As coded in ZetangForward/Global_Mamba at
859b569, custom_dataset/build_mqar.py (`build_ngram_mqar`, `build_ngram_robustness_mqar`).
"""

import re
from typing import Any, Literal

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError, nearest
from basecap.tasks._contract import Answers, Cell, Task, task
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import NOTHING, Canvas, Role
from basecap.tasks._recall import RecallConfig, need_room, need_tokens, query_places
from basecap.tasks.mqar import SPECIAL, published_cells

#: Tokens around a pair, between key and value, and in place of a queried value.
SEPARATOR, SEPARATOR_KV, MASK = 10, 11, 12


class KnvmConfig(RecallConfig):
    """Options of KnVm."""

    key_tokens: int = Field(2, ge=1, le=64, description="n, tokens of a key")
    value_tokens: int = Field(2, ge=1, le=64, description="m, tokens of a value")
    positions: Literal["standard", "shuffle"] = Field(
        "standard",
        description="positions of the pairs: standard (at the start) or shuffle (anywhere in the first half)",
    )
    shared: bool = Field(False, description="all keys of an example end in the same n-1 tokens; query gaps are uniform")
    closing: bool = Field(False, description="also train the separator after a query, as in the published training")


def _options(n: int, m: int) -> dict[str, Any]:
    """Return n and m, and the smallest power of two, at least 64, as a length with room for four pairs."""
    return {"key_tokens": n, "value_tokens": m, "length": max(64, 1 << (8 * (3 + n + m) - 1).bit_length())}


def _named(n: int, m: int) -> dict[str, tuple[str, dict[str, Any]]]:
    title, options = f"keys of {n} and values of {m} tokens", _options(n, m)
    return {
        f"mqar-k{n}v{m}": (title, options),
        f"mqar-k{n}v{m}-shuffle": (f"{title}, scattered over the first half", {**options, "positions": "shuffle"}),
    }


@task(
    "mqar-knvm",
    source="arXiv 2410.15678",
    summary="keys of n and values of m tokens; any name like mqar-k3v5 or mqar-k3v5-shuffle",
    variants={
        **_named(1, 1),
        **_named(1, 2),
        **_named(2, 2),
        **_named(4, 8),
        "mqar-k2v2-robustness": (
            "K2V2 with keys that differ only in the first token",
            {**_options(2, 2), "shared": True},
        ),
    },
)
class Knvm(Task):
    """A pair is SEP k.. SEP_KV v.. SEP; a query has MASK instead of the value, and targets one position earlier.

    Keys are drawn from [20, V/2 + 20), values from [V/2 + 20, V + 20). In paper mode keys are drawn with replacement,
    so that a key may have several values; in clean mode the keys of an example are distinct.
    """

    Config = KnvmConfig

    @classmethod
    def options_of(cls, name: str) -> dict[str, Any] | None:
        """Return the options of mqar-k<n>v<m>, optionally with -shuffle or -robustness; None for other names."""
        found = re.fullmatch(r"(mqar-k([1-9]\d?)v([1-9]\d?))(-.*)?", name)
        if found is None:
            return None
        variants: dict[str, dict[str, Any]] = {
            f"{found[1]}-shuffle": {"positions": "shuffle"},
            f"{found[1]}-robustness": {"shared": True},
        }
        if found[4] is not None and name not in variants:
            raise ConfigError(f"task {found[1]!r} has no variant {name!r}: {nearest(name, variants)}")
        return _options(int(found[2]), int(found[3])) | variants.get(name, {})

    @property
    def vocabulary(self) -> int:
        """Number of token ids: vocab plus 20 special tokens."""
        return self.config.vocab + SPECIAL

    @property
    def _width(self) -> int:
        return 3 + self.config.key_tokens + self.config.value_tokens

    def check(self) -> None:
        """Raise ConfigError if the pairs do not fit the length or the vocabulary."""
        c = self.config
        need_room(c.pairs, c.length // 2 // self._width, c.length)
        free = 1 if c.shared else c.key_tokens
        if c.shared and c.key_tokens == 1:
            raise ConfigError("shared keys need at least two tokens; set key_tokens to 2 or more.")
        if c.shared and c.positions == "shuffle":
            raise ConfigError("shared keys need pairs at the start; set positions to standard.")
        need_tokens(c.pairs, (c.vocab // 2) ** free, "keys", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the published cells with pairs in at most half the length; for robustness those of the code."""
        cells = published_cells(4)
        if self.config.shared:
            pairs = {64: (1, 4, 8), 256: (1, 4, 8, 16), 512: (1, 4, 8, 16, 32)}
            cells = tuple({"length": length, "pairs": count} for length in pairs for count in pairs[length])
        return tuple(cell for cell in cells if cell["pairs"] * self._width <= cell["length"] // 2)

    def _keys(self, draws: ExampleDraws) -> Ints:
        """Return the keys of all pairs, from 0: int64 [N, P, n]."""
        c = self.config
        free, size = 1 if c.shared else c.key_tokens, c.vocab // 2
        if c.mode == "clean":
            keys = draws.distinct_words("keys", c.pairs, size, free)
        else:
            keys = draws.below("keys", c.pairs * free, size).reshape(draws.size, c.pairs, free)
        if not c.shared:
            return keys
        end = np.repeat(draws.below("end", c.key_tokens - 1, size)[:, None], c.pairs, axis=1)
        return np.concatenate([keys, end], axis=2)

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        half, width = c.vocab // 2, self._width
        keys = SPECIAL + self._keys(draws)
        drawn = draws.below("values", c.pairs * c.value_tokens, c.vocab - half)
        values = SPECIAL + half + drawn.reshape(draws.size, c.pairs, c.value_tokens)
        if c.positions == "shuffle":
            context = c.length // 2
            starts = width * draws.slots("places", c.pairs, context // width)
        else:
            context = c.pairs * width
            starts = width * np.arange(c.pairs)[None]
        canvas.inputs[:] = draws.tokens("filler", c.length, SPECIAL, self.vocabulary)
        self._write(canvas, starts, keys, Role.KEY)
        gaps = c.model_copy(update={"power": 1.0}) if c.shared else c
        places = query_places(draws, gaps, context, width)
        self._write(canvas, places, keys, Role.QUERY)
        numbers = np.arange(c.pairs)
        first = places + c.key_tokens + 1
        for part in range(c.value_tokens):
            canvas.write(starts + c.key_tokens + 2 + part, values[:, :, part], Role.VALUE, numbers)
            canvas.write(first + 1 + part, MASK, Role.MASK, numbers)
            canvas.ask(first + part, values[:, :, part], numbers)
        if c.closing:
            canvas.ask(first + c.value_tokens, SEPARATOR, NOTHING)

    def _write(self, canvas: Canvas, starts: Ints, keys: Ints, role: Role) -> None:
        numbers = np.arange(self.config.pairs)
        middle = self.config.key_tokens + 1
        for place, token in ((0, SEPARATOR), (middle, SEPARATOR_KV), (self._width - 1, SEPARATOR)):
            canvas.write(starts + place, token, Role.SEPARATOR, numbers)
        for part in range(self.config.key_tokens):
            canvas.write(starts + 1 + part, keys[:, :, part], role, numbers)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the values of all pairs with the queried key."""
        n, m = self.config.key_tokens, self.config.value_tokens
        tokens = inputs.tolist()
        values: dict[tuple[int, ...], list[list[int]]] = {}
        queried: dict[int, tuple[int, ...]] = {}
        for start in range(len(tokens) - self._width + 1):
            ends = (tokens[start], tokens[start + n + 1], tokens[start + self._width - 1])
            if ends != (SEPARATOR, SEPARATOR_KV, SEPARATOR):
                continue
            key = tuple(tokens[start + 1 : start + n + 1])
            value = tokens[start + n + 2 : start + n + 2 + m]
            if value == [MASK] * m:
                queried[start + n + 1] = key
            else:
                values.setdefault(key, []).append(value)
        answers = {
            first + part: frozenset(value[part] for value in values.get(key, []))
            for first, key in queried.items()
            for part in range(m)
        }
        return {place: answers.get(place, frozenset()) for place in asked.tolist()}
