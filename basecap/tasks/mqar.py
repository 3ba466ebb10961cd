"""Multi-query associative recall with pairs of one key and one value, and where in the context they stand.

Defined by arXiv 2410.15678, section 3.2 and appendix B, after arXiv 2312.04927. As coded in ZetangForward/Global_Mamba
at 859b569, custom_dataset/build_mqar.py (`build_position_mqar`); position robustness as in
tmp_code/state-space-model/custom_dataset/AR_ywj.py (`build_robustness_split_mqar`).
"""

from typing import Literal

import numpy as np
from pydantic import Field

from basecap.tasks._contract import Answers, Cell, Task, task
from basecap.tasks._draws import Draws, Ints
from basecap.tasks._instances import Canvas
from basecap.tasks._recall import RecallConfig, followers, need_room, need_tokens, queries, write_pairs

#: Random filler begins at this id and the vocabulary is longer by as many: ids below are kept for special tokens.
SPECIAL = 20
REGIONS = 4

_SOURCE = "arXiv 2410.15678"


def published_cells(ceiling: int) -> tuple[Cell, ...]:
    """Return lengths 64 to 512 with pairs in powers of two up to length / `ceiling`."""
    lengths = (64, 128, 256, 512)
    return tuple({"length": n, "pairs": 2**k} for n in lengths for k in range((n // ceiling).bit_length()))


def fill(draws: Draws, canvas: Canvas, vocab: int, avoid: Ints | None) -> None:
    """Fill an example with random tokens of [20, vocab + 20), none of which stands in its row of `avoid`."""
    canvas.inputs[:] = draws.tokens("filler", canvas.inputs.shape[1], SPECIAL, vocab + SPECIAL, avoid)


class PlacedConfig(RecallConfig):
    """Options of recall with single tokens."""

    empty: Literal["random", "zeros"] = Field("random", description="what stands between pairs and queries")


class MqarConfig(PlacedConfig):
    """Options of MQAR."""

    positions: Literal["standard", "last", "shuffle"] = Field(
        "standard", description="where pairs stand: at the start, at the end of the first half, all over the first half"
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
    """Keys are drawn from [1, V/2), values from [V/2, V); the answer is given at the queried key.

    The authors' Shuffle draws keys and values with replacement, so that a key may have several values; and their filler
    may repeat a key. In clean mode keys are distinct and no filler is a key of its example.
    """

    Config = MqarConfig

    @property
    def vocabulary(self) -> int:
        """Number of token ids: filler reaches up to vocab + 20."""
        return self.config.vocab + SPECIAL

    def _context(self) -> int:
        c = self.config
        return 2 * c.pairs if c.positions == "standard" else c.length // 2

    def check(self) -> None:
        """Raise ConfigError when the pairs fit neither the length nor the vocabulary."""
        c = self.config
        need_room(c.pairs, c.length // 4, c.length)
        need_tokens(c.pairs, c.vocab // 2 - 1, "keys", c.vocab)

    def grid(self) -> tuple[Cell, ...]:
        """Return the 26 cells of appendix B.1."""
        return published_cells(4)

    def make(self, draws: Draws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        context, half = self._context(), c.vocab // 2
        repeats = c.mode == "paper" and c.positions == "shuffle"
        draw = draws.below if repeats else draws.distinct
        keys = 1 + draw("keys", c.pairs, half - 1)
        values = half + draw("values", c.pairs, c.vocab - half)
        starts = 2 * np.arange(c.pairs)[None] + (context - 2 * c.pairs if c.positions == "last" else 0)
        if c.positions == "shuffle":
            starts = 2 * draws.slots("places", c.pairs, context // 2)
        write_filler(draws, canvas, c, keys)
        write_pairs(canvas, starts, keys, values)
        queries(draws, canvas, c, context, keys, values)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return what follows the queried key elsewhere in the context."""
        return followers(inputs, asked)


class PositionRobustnessConfig(PlacedConfig):
    """Options of position robustness."""

    empty: Literal["random", "zeros"] = Field("zeros", description="what stands between pairs and queries")


@task(
    "mqar-position-robustness",
    source=_SOURCE,
    summary="every key stands in all four quarters of the first half, each time with another value",
)
class PositionRobustness(Task):
    """The answer to a query tells which region a model reads: any of the key's four values is right.

    Every region begins with all pairs in one order. The authors' value in region r is the first value plus r, and their
    empty positions are zeros, against the paper's text. In clean mode all values of an example are different. Targets
    hold the values of the first region.
    """

    Config = PositionRobustnessConfig

    @property
    def vocabulary(self) -> int:
        """Number of token ids: filler reaches up to vocab + 20."""
        return self.config.vocab + SPECIAL

    def check(self) -> None:
        """Raise ConfigError when the pairs fit neither a region nor the vocabulary."""
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

    def make(self, draws: Draws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        context, half = c.length // 2, c.vocab // 2
        keys = 1 + draws.distinct("keys", c.pairs, half - 1)
        if c.mode == "paper":
            values = half + draws.distinct("values", c.pairs, c.vocab - half)[:, :, None] + np.arange(REGIONS)
        else:
            drawn = half + draws.distinct("values", c.pairs * REGIONS, c.vocab - half)
            values = drawn.reshape(draws.size, c.pairs, REGIONS)
        write_filler(draws, canvas, c, keys)
        for region in range(REGIONS):
            starts = region * (context // REGIONS) + 2 * np.arange(c.pairs)[None]
            write_pairs(canvas, starts, keys, values[:, :, region])
        queries(draws, canvas, c, context, keys, values[:, :, 0])
        canvas.choose(values)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return what follows the queried key elsewhere in the context."""
        return followers(inputs, asked)


def write_filler(draws: Draws, canvas: Canvas, config: PlacedConfig, keys: Ints) -> None:
    """Write what stands where nothing else will."""
    if config.empty == "zeros":
        canvas.inputs.fill(0)
    else:
        fill(draws, canvas, config.vocab, keys if config.mode == "clean" else None)
