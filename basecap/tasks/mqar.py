"""Multi-query associative recall with keys and values of one token, at different positions of the context.

Defined by arXiv 2410.15678, section 3.2 and appendix B, after arXiv 2312.04927. As coded in ZetangForward/Global_Mamba
at 859b569, custom_dataset/build_mqar.py (`build_position_mqar`); position robustness as in
tmp_code/state-space-model/custom_dataset/AR_ywj.py (`build_robustness_split_mqar`).
"""

from typing import Literal

import numpy as np
from pydantic import Field

from basecap.tasks._contract import Answers, Cell, Task, task
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import Canvas
from basecap.tasks._recall import FilledConfig, followers, need_room, need_tokens, queries, write_filler, write_pairs

#: Number of ids reserved for special tokens; filler starts after them and the vocabulary is longer by them.
SPECIAL = 20
REGIONS = 4

_SOURCE = "arXiv 2410.15678"


def published_cells(ceiling: int) -> tuple[Cell, ...]:
    """Return lengths 64 to 512, with pairs in powers of two up to length / `ceiling`."""
    lengths = (64, 128, 256, 512)
    return tuple({"length": n, "pairs": 2**k} for n in lengths for k in range((n // ceiling).bit_length()))


class MqarConfig(FilledConfig):
    """Options of MQAR."""

    positions: Literal["standard", "last", "shuffle"] = Field(
        "standard", description="positions of the pairs: at the start, at the end, or anywhere in the first half"
    )


@task(
    "mqar",
    source=_SOURCE,
    summary="recall of single tokens, pairs packed at the start (Standard)",
    variants={
        "mqar-last": ("pairs packed at the end of the first half", {"positions": "last"}),
        "mqar-shuffle": ("pairs scattered over the first half", {"positions": "shuffle"}),
    },
)
class Mqar(Task):
    """Keys are drawn from [1, V/2), values from [V/2, V); the target is at the queried key.

    In paper mode Shuffle draws keys and values with replacement, so that a key may have several values, and filler may
    repeat a key. In clean mode keys are distinct and filler contains no key of its example.
    """

    Config = MqarConfig

    @property
    def vocabulary(self) -> int:
        """Number of token ids: vocab plus 20 special tokens."""
        return self.config.vocab + SPECIAL

    def check(self) -> None:
        """Raise ConfigError if the pairs do not fit the length or the vocabulary."""
        c = self.config
        need_room(c.pairs, c.length // 4, c.length)
        need_tokens(c.pairs, c.vocab // 2 - 1, "keys", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the 26 cells of appendix B.1."""
        return published_cells(4)

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        context, half = 2 * c.pairs if c.positions == "standard" else c.length // 2, c.vocab // 2
        repeats = c.mode == "paper" and c.positions == "shuffle"
        draw = draws.below if repeats else draws.distinct
        keys = 1 + draw("keys", c.pairs, half - 1)
        values = half + draw("values", c.pairs, c.vocab - half)
        starts = 2 * np.arange(c.pairs)[None] + (context - 2 * c.pairs if c.positions == "last" else 0)
        if c.positions == "shuffle":
            starts = 2 * draws.slots("places", c.pairs, context // 2)
        write_filler(draws, canvas, c, range(SPECIAL, self.vocabulary), keys)
        write_pairs(canvas, starts, keys, values)
        queries(draws, canvas, c, context, keys, values)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the tokens after the queried key in the context."""
        return followers(inputs, asked)


class PositionRobustnessConfig(FilledConfig):
    """Options of position robustness."""

    empty: Literal["random", "zeros"] = Field("zeros", description="filler between pairs and queries")


@task(
    "mqar-position-robustness",
    source=_SOURCE,
    summary="every key is in all four quarters of the first half, each time with another value",
)
class PositionRobustness(Task):
    """The answer to a query shows which region a model reads: any of the key's four values is right.

    Every region starts with all pairs in the same order. In paper mode the value in region r is the first value plus r;
    in clean mode all values of an example are distinct. Empty positions are zeros as in the authors' code, unlike in
    the paper's text. Targets are the values of the first region.
    """

    Config = PositionRobustnessConfig

    @property
    def vocabulary(self) -> int:
        """Number of token ids: vocab plus 20 special tokens."""
        return self.config.vocab + SPECIAL

    def check(self) -> None:
        """Raise ConfigError if the pairs do not fit a region or the vocabulary."""
        c = self.config
        need_room(c.pairs, c.length // 2 // REGIONS // 2, c.length)
        need_tokens(c.pairs, c.vocab // 2 - 1, "keys", c.vocab)
        wanted = c.pairs if c.mode == "paper" else REGIONS * c.pairs
        need_tokens(wanted, c.vocab - c.vocab // 2, "values", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the 18 cells of the authors' code."""
        return published_cells(16)

    def choice_shape(self) -> tuple[int, int]:
        """Return the number of pairs and of regions."""
        return self.config.pairs, REGIONS

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        context, half = c.length // 2, c.vocab // 2
        keys = 1 + draws.distinct("keys", c.pairs, half - 1)
        if c.mode == "paper":
            values = half + draws.distinct("values", c.pairs, c.vocab - half)[:, :, None] + np.arange(REGIONS)
        else:
            drawn = half + draws.distinct("values", c.pairs * REGIONS, c.vocab - half)
            values = drawn.reshape(draws.size, c.pairs, REGIONS)
        write_filler(draws, canvas, c, range(SPECIAL, self.vocabulary), keys)
        for region in range(REGIONS):
            starts = region * (context // REGIONS) + 2 * np.arange(c.pairs)[None]
            write_pairs(canvas, starts, keys, values[:, :, region])
        queries(draws, canvas, c, context, keys, values[:, :, 0])
        canvas.choose(values)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the tokens after the queried key in the context."""
        return followers(inputs, asked)
