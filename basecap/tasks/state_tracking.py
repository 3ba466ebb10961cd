"""State tracking: the product of all elements of a group that were read so far.

The word problems of arXiv 2404.08819, and parity as in arXiv 2411.12537. Z60 and A5 have as many elements; only for
products of A5 and S5 has a circuit to grow with the length. The first token is its own product, which is trained but
not scored. Both modes are the same.
"""

from functools import cache
from itertools import permutations
from typing import Literal

import numpy as np
from pydantic import Field

from basecap.tasks._contract import Answers, Cell, Task, TaskConfig, task
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import Canvas, Role

Group = Literal["parity", "Z60", "A5", "S5"]
ORDERS: dict[Group, int] = {"parity": 2, "Z60": 60, "A5": 60, "S5": 120}


class StateTrackingConfig(TaskConfig):
    """Options of state tracking."""

    length: int = Field(64, ge=2, le=2**20, description="tokens of an example")
    group: Group = Field("parity", description="the group: parity (Z2), Z60, A5 or S5")


@task(
    "parity",
    source="arXiv 2411.12537",
    summary="the parity of the ones so far, at every position",
    variants={
        "state-tracking-z60": ("the sum so far modulo 60, at every position", {"group": "Z60"}),
        "state-tracking-a5": ("the product so far of even permutations of five things", {"group": "A5"}),
        "state-tracking-s5": ("the product so far of permutations of five things", {"group": "S5"}),
    },
)
class StateTracking(Task):
    """Random elements of a group; the target at t is x_t ... x_2 x_1, the last one applied last."""

    Config = StateTrackingConfig
    axes = ("length",)

    @property
    def vocabulary(self) -> int:
        """Number of elements of the group."""
        return ORDERS[self.config.group]

    def grid(self) -> tuple[Cell, ...]:
        """Return lengths of our choice: the papers train at up to 25 and 40 tokens, and test parity at up to 256."""
        return tuple({"length": 2**power} for power in range(3, 9))

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        T, table = self.config.length, products(self.config.group)
        tokens = draws.below("elements", T, self.vocabulary)
        places, states = np.arange(T)[None], np.empty_like(tokens)
        states[:, 0] = tokens[:, 0]
        for t in range(1, T):
            states[:, t] = table[tokens[:, t], states[:, t - 1]]
        canvas.write(places, tokens, Role.QUERY, places)
        canvas.ask(places, states, places - 1)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the products, of sums or of permutations applied one after the other."""
        group, wanted = self.config.group, set(asked.tolist())
        found: Answers = {}
        if group in ("parity", "Z60"):
            for place, total in enumerate(np.cumsum(inputs) % self.vocabulary):
                found[place] = frozenset({int(total)})
            return {place: found[place] for place in wanted}
        elements = permutations_of(group)
        things: tuple[int, ...] = (0, 1, 2, 3, 4)
        for place, token in enumerate(inputs.tolist()):
            things = tuple(elements[token][thing] for thing in things)
            found[place] = frozenset({elements.index(things)})
        return {place: found[place] for place in wanted}


def permutations_of(group: Group) -> list[tuple[int, ...]]:
    """Return the elements of A5 or S5 in lexicographic order, each the image of 0 to 4."""
    every = list(permutations(range(5)))
    return every if group == "S5" else [each for each in every if is_even(each)]


def is_even(permutation: tuple[int, ...]) -> bool:
    """Whether the number of pairs in falling order is even."""
    pairs = [(i, j) for i in range(5) for j in range(i)]
    return sum(permutation[j] > permutation[i] for i, j in pairs) % 2 == 0


@cache
def products(group: Group) -> Ints:
    """Return the table of products "first b, then a" at [a, b], int64."""
    numbers = np.arange(ORDERS[group])
    if group in ("parity", "Z60"):
        return (numbers[:, None] + numbers[None]) % ORDERS[group]
    elements = np.array(permutations_of(group))
    base = 5 ** np.arange(5)
    number_of = np.zeros(int((4 * base).sum()) + 1, dtype=np.int64)
    number_of[elements @ base] = numbers
    return number_of[elements[:, elements] @ base]
