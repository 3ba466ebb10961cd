"""Zoology's multi-query associative recall, with its forgetting and compositional forms.

Defined by arXiv 2312.04927. As coded in HazyResearch/zoology at d88d6f5, zoology/data: multiquery_ar.py,
forgetting_mqar.py and compositional_mqar.py; cells from zoology/experiments (iclr24_zoology_figure2,
mqar_example_configs).
"""

import math
from typing import Literal

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Task, task
from basecap.tasks._draws import Draws, Ints
from basecap.tasks._instances import Canvas, Role
from basecap.tasks._recall import (
    RecallConfig,
    followers,
    need_room,
    need_tokens,
    queries,
    query_places,
    write_pairs,
)

_SOURCE = "arXiv 2312.04927; HazyResearch/zoology"


class ZoologyConfig(RecallConfig):
    """Options of all three forms."""

    vocab: int = Field(8192, ge=8, le=2**24, description="number of token ids: 0, then keys, then values")
    empty: Literal["random", "zeros"] = Field(
        "random", description="what stands where nothing else does: random_non_queries on or off"
    )


def _cells(*pairs: tuple[int, int]) -> tuple[Cell, ...]:
    return tuple({"length": length, "pairs": count} for length, count in pairs)


def _write_filler(draws: Draws, canvas: Canvas, config: ZoologyConfig, keys: Ints) -> None:
    """Fill an example with zeros or random tokens, which in clean mode are none of its keys."""
    if config.empty == "zeros":
        canvas.inputs.fill(0)
    else:
        avoid = keys if config.mode == "clean" else None
        canvas.inputs[:] = draws.tokens("filler", canvas.inputs.shape[1], 0, config.vocab, avoid)


class _Zoology(Task):
    """What the three forms share."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocab


class ZoologyMqarConfig(ZoologyConfig):
    """Options of the plain form."""

    passes: int = Field(1, ge=1, le=64, description="how often the pairs are repeated before the queries")


@task(
    "zoology-mqar",
    source=_SOURCE,
    summary="recall of single tokens, random tokens in empty positions",
    variants={"zoology-mqar-zeros": ("the same with zeros in empty positions, as in figure 2", {"empty": "zeros"})},
)
class ZoologyMqar(_Zoology):
    """Keys are drawn from [1, V/2), values from [V/2, V), random filler from [0, V): as coded it may repeat a key."""

    Config = ZoologyMqarConfig

    def check(self) -> None:
        """Raise ConfigError when the pairs fit neither the length nor the vocabulary."""
        c = self.config
        need_room(c.pairs, c.length // 2 // (c.passes + 1), c.length)
        need_tokens(c.pairs, c.vocab // 2 - 1, "keys", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the cells of figure 2 with zeros, those that the repository's example tests on with random filler."""
        if self.config.empty == "zeros":
            return _cells((64, 4), (128, 8), (256, 16), (512, 64))
        return _cells((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))

    def make(self, draws: Draws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        half = c.vocab // 2
        keys = 1 + draws.distinct("keys", c.pairs, half - 1)
        values = half + draws.distinct("values", c.pairs, c.vocab - half)
        _write_filler(draws, canvas, c, keys)
        for number in range(c.passes):
            write_pairs(canvas, 2 * (number * c.pairs + np.arange(c.pairs))[None], keys, values)
        queries(draws, canvas, c, 2 * c.pairs * c.passes, keys, values)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return what follows the queried key elsewhere."""
        return followers(inputs, asked)


class ForgettingConfig(ZoologyConfig):
    """Options of the forgetting form."""

    updates: int = Field(4, ge=0, le=2**19, description="keys that get another value before the queries")


@task("zoology-forgetting", source=_SOURCE, summary="some keys get another value; the last one counts")
class Forgetting(_Zoology):
    """All pairs, then the pairs of keys that change, then queries for the values that hold last.

    The authors choose an update's value different from the first value of another key than the one that changes, so
    that it may be the old one; in clean mode it is a new value.
    """

    Config = ForgettingConfig

    def check(self) -> None:
        """Raise ConfigError when pairs and updates fit neither each other, the length nor the vocabulary."""
        c = self.config
        if c.updates > c.pairs:
            raise ConfigError(
                f"{c.updates} updates need as many pairs, not {c.pairs}; set fewer updates or more pairs."
            )
        need_room(c.pairs, (c.length // 2 - c.updates) // 2, c.length)
        need_tokens(c.pairs, c.vocab // 2 - 1, "keys", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the cells that the repository's example tests on, with 4 updates each."""
        return _cells((64, 4), (64, 9), (128, 16), (256, 36), (512, 64), (1024, 144), (2048, 256))

    def make(self, draws: Draws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        half = c.vocab // 2
        keys = 1 + draws.distinct("keys", c.pairs, half - 1)
        values = half + draws.distinct("values", c.pairs, c.vocab - half)
        changed = draws.slots("changed", c.updates, c.pairs)
        unlike = np.take_along_axis(values, changed, axis=1) if c.mode == "clean" else values[:, : c.updates]
        # a shift by 1 to size - 1 around the ring of values reaches every value but the one it starts from
        shift = 1 + draws.below("new values", c.updates, c.vocab - half - 1)
        new = half + (unlike - half + shift) % (c.vocab - half)
        _write_filler(draws, canvas, c, keys)
        write_pairs(canvas, 2 * np.arange(c.pairs)[None], keys, values)
        again = 2 * (c.pairs + np.arange(c.updates))[None]
        canvas.write(again, np.take_along_axis(keys, changed, axis=1), Role.KEY, changed)
        canvas.write(again + 1, new, Role.VALUE, changed)
        np.put_along_axis(values, changed, new, axis=1)
        queries(draws, canvas, c, 2 * (c.pairs + c.updates), keys, values)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return what follows the key's last occurrence in the context, and what follows it behind the context."""
        context = 2 * (self.config.pairs + self.config.updates)
        tokens, queried = inputs.tolist(), set(asked.tolist())
        answers = {}
        for place in asked.tolist():
            ends = [end for end in range(place) if tokens[end] == tokens[place] and end not in queried]
            inside = [end for end in ends if end < context and end % 2 == 0]
            answers[place] = frozenset(tokens[end + 1] for end in ends if end >= max(inside))
        return answers


@task(
    "zoology-compositional", source=_SOURCE, summary="keys of two parts on a grid: neither part alone tells the value"
)
class Compositional(_Zoology):
    """With g*g pairs, g first parts and g second parts are drawn and every combination has a value of its own.

    First parts are drawn from [1, V/3), second parts from [V/3, 2V/3), values from [2V/3, V).
    """

    Config = ZoologyConfig

    @property
    def _side(self) -> int:
        return math.isqrt(self.config.pairs)

    def check(self) -> None:
        """Raise ConfigError when the pairs form no square, or fit neither the length nor the vocabulary."""
        c = self.config
        side = self._side
        if side * side != c.pairs:
            near = sorted({max(1, side) ** 2, (side + 1) ** 2})
            raise ConfigError(f"{c.pairs} pairs form no square grid; set pairs to {near[0]} or {near[1]}.")
        need_room(c.pairs, c.length // 6, c.length)
        need_tokens(side, c.vocab // 3 - 1, "first parts of keys", c.vocab)
        need_tokens(c.pairs, c.vocab - 2 * (c.vocab // 3), "values", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the cells that the repository's example tests on."""
        return _cells((64, 4), (64, 9), (128, 16), (256, 36), (512, 64), (1024, 144), (2048, 256))

    def make(self, draws: Draws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        third, side = c.vocab // 3, self._side
        first = 1 + draws.distinct("first parts", side, third - 1)
        second = third + draws.distinct("second parts", side, third)
        order = draws.slots("order", c.pairs, c.pairs)
        keys = (np.take_along_axis(first, order // side, axis=1), np.take_along_axis(second, order % side, axis=1))
        values = 2 * third + draws.distinct("values", c.pairs, c.vocab - 2 * third)
        _write_filler(draws, canvas, c, np.concatenate([first, second], axis=1))
        starts = 3 * np.arange(c.pairs)[None]
        places = query_places(draws, c, 3 * c.pairs, 3)
        numbers = np.arange(c.pairs)
        for part, tokens in enumerate(keys):
            canvas.write(starts + part, tokens, Role.KEY, numbers)
            canvas.write(places + part, tokens, Role.QUERY, numbers)
        canvas.write(starts + 2, values, Role.VALUE, numbers)
        canvas.ask(places + 1, values, numbers)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return what follows both parts of the queried key elsewhere."""
        return followers(inputs, asked, width=2)
