"""Zoology's multi-query associative recall, and its forgetting and compositional forms.

Defined by arXiv 2312.04927. As coded in HazyResearch/zoology at d88d6f5, zoology/data: multiquery_ar.py,
forgetting_mqar.py and compositional_mqar.py; cells from zoology/experiments (iclr24_zoology_figure2,
mqar_example_configs).
"""

import math

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Task, task
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import Canvas, Role
from basecap.tasks._recall import (
    FilledConfig,
    followers,
    need_room,
    need_tokens,
    queries,
    query_places,
    write_filler,
    write_pairs,
)

_SOURCE = "arXiv 2312.04927; HazyResearch/zoology"


class ZoologyConfig(FilledConfig):
    """Options of all three forms."""

    vocab: int = Field(8192, ge=8, le=2**24, description="number of token ids: 0, then keys, then values")


def _cells(*pairs: tuple[int, int]) -> tuple[Cell, ...]:
    return tuple({"length": length, "pairs": count} for length, count in pairs)


class _Zoology(Task):
    """Base class of the three forms."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocab


class ZoologyMqarConfig(ZoologyConfig):
    """Options of the plain form."""

    passes: int = Field(1, ge=1, le=64, description="number of times that the pairs are written before the queries")


@task(
    "zoology-mqar",
    source=_SOURCE,
    summary="recall of single tokens, random tokens in empty positions",
    variants={"zoology-mqar-zeros": ("zoology-mqar with zeros in empty positions, as in figure 2", {"empty": "zeros"})},
)
class ZoologyMqar(_Zoology):
    """Keys are drawn from [1, V/2), values from [V/2, V), filler from [0, V); in paper mode it may repeat a key."""

    Config = ZoologyMqarConfig

    def check(self) -> None:
        """Raise ConfigError if the pairs do not fit the length or the vocabulary."""
        c = self.config
        need_room(c.pairs, c.length // 2 // (c.passes + 1), c.length)
        need_tokens(c.pairs, c.vocab // 2 - 1, "keys", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the cells of figure 2 (zeros) or the test cells of the repository's example (random filler)."""
        if self.config.empty == "zeros":
            return _cells((64, 4), (128, 8), (256, 16), (512, 64))
        return _cells((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        half = c.vocab // 2
        keys = 1 + draws.distinct("keys", c.pairs, half - 1)
        values = half + draws.distinct("values", c.pairs, c.vocab - half)
        write_filler(draws, canvas, c, range(c.vocab), keys)
        for number in range(c.passes):
            write_pairs(canvas, 2 * (number * c.pairs + np.arange(c.pairs))[None], keys, values)
        queries(draws, canvas, c, 2 * c.pairs * c.passes, keys, values)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the tokens after the queried key."""
        return followers(inputs, asked)


class ForgettingConfig(ZoologyConfig):
    """Options of the forgetting form."""

    updates: int = Field(4, ge=0, le=2**19, description="number of keys that get a new value before the queries")


@task("zoology-forgetting", source=_SOURCE, summary="some keys get a new value; the last one counts")
class Forgetting(_Zoology):
    """All pairs, then the pairs of the updated keys, then queries for the last value of each key.

    In paper mode a new value differs from the first value of another key than the updated one, so that it may equal the
    old value; in clean mode it differs from the old value.
    """

    Config = ForgettingConfig

    def check(self) -> None:
        """Raise ConfigError if there are more updates than pairs, or they do not fit the length or the vocabulary."""
        c = self.config
        if c.updates > c.pairs:
            raise ConfigError(
                f"{c.updates} updates need at least as many pairs, not {c.pairs}; lower updates or raise pairs."
            )
        need_room(c.pairs, (c.length // 2 - c.updates) // 2, c.length)
        need_tokens(c.pairs, c.vocab // 2 - 1, "keys", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the test cells of the repository's example, with 4 updates each."""
        return _cells((64, 4), (64, 9), (128, 16), (256, 36), (512, 64), (1024, 144), (2048, 256))

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        half = c.vocab // 2
        keys = 1 + draws.distinct("keys", c.pairs, half - 1)
        values = half + draws.distinct("values", c.pairs, c.vocab - half)
        changed = draws.slots("changed", c.updates, c.pairs)
        unlike = np.take_along_axis(values, changed, axis=1) if c.mode == "clean" else values[:, : c.updates]
        # a cyclic shift by 1 to size - 1 gives every value except the original one
        shift = 1 + draws.below("new values", c.updates, c.vocab - half - 1)
        new = half + (unlike - half + shift) % (c.vocab - half)
        write_filler(draws, canvas, c, range(c.vocab), keys)
        write_pairs(canvas, 2 * np.arange(c.pairs)[None], keys, values)
        again = 2 * (c.pairs + np.arange(c.updates))[None]
        canvas.write(again, np.take_along_axis(keys, changed, axis=1), Role.KEY, changed)
        canvas.write(again + 1, new, Role.VALUE, changed)
        np.put_along_axis(values, changed, new, axis=1)
        queries(draws, canvas, c, 2 * (c.pairs + c.updates), keys, values)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the tokens after the key's last occurrence in the context and after later ones."""
        context = 2 * (self.config.pairs + self.config.updates)
        tokens, queried = inputs.tolist(), set(asked.tolist())
        answers = {}
        for place in asked.tolist():
            ends = [end for end in range(place) if tokens[end] == tokens[place] and end not in queried]
            inside = [end for end in ends if end < context and end % 2 == 0]
            answers[place] = frozenset(tokens[end + 1] for end in ends if end >= max(inside))
        return answers


@task("zoology-compositional", source=_SOURCE, summary="keys of two parts; both are needed to find the value")
class Compositional(_Zoology):
    """With g*g pairs, g first parts and g second parts are drawn, and every combination has its own value.

    First parts are drawn from [1, V/3), second parts from [V/3, 2V/3), values from [2V/3, V).
    """

    Config = ZoologyConfig

    @property
    def _side(self) -> int:
        return math.isqrt(self.config.pairs)

    def check(self) -> None:
        """Raise ConfigError if the number of pairs is not a square, or does not fit the length or the vocabulary."""
        c = self.config
        side = self._side
        if side * side != c.pairs:
            near = sorted({max(1, side) ** 2, (side + 1) ** 2})
            raise ConfigError(f"{c.pairs} pairs are not a square number; set pairs to {near[0]} or {near[1]}.")
        need_room(c.pairs, c.length // 6, c.length)
        need_tokens(side, c.vocab // 3 - 1, "first parts of keys", c.vocab)
        need_tokens(c.pairs, c.vocab - 2 * (c.vocab // 3), "values", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the test cells of the repository's example."""
        return _cells((64, 4), (64, 9), (128, 16), (256, 36), (512, 64), (1024, 144), (2048, 256))

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        third, side = c.vocab // 3, self._side
        first = 1 + draws.distinct("first parts", side, third - 1)
        second = third + draws.distinct("second parts", side, third)
        order = draws.slots("order", c.pairs, c.pairs)
        keys = (np.take_along_axis(first, order // side, axis=1), np.take_along_axis(second, order % side, axis=1))
        values = 2 * third + draws.distinct("values", c.pairs, c.vocab - 2 * third)
        write_filler(draws, canvas, c, range(c.vocab), np.concatenate([first, second], axis=1))
        starts = 3 * np.arange(c.pairs)[None]
        places = query_places(draws, c, 3 * c.pairs, 3)
        numbers = np.arange(c.pairs)
        for part, tokens in enumerate(keys):
            canvas.write(starts + part, tokens, Role.KEY, numbers)
            canvas.write(places + part, tokens, Role.QUERY, numbers)
        canvas.write(starts + 2, values, Role.VALUE, numbers)
        canvas.ask(places + 1, values, numbers)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the tokens after both parts of the queried key."""
        return followers(inputs, asked, width=2)
