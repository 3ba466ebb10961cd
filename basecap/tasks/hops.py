"""Hops: follow a chain of pairs, given in random order, several steps from a node.

The task Depo of "Physics of Language Models", part 4.1 (SSRN 5240330), with names of one token: the edges of one cycle
through all nodes in random order, then questions for the node k steps after another. Both modes are the same.
"""

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Task, TaskConfig, task
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import Canvas, Role


class HopsConfig(TaskConfig):
    """Options of hops."""

    length: int = Field(64, ge=4, le=2**20, description="tokens of an example")
    nodes: int = Field(16, ge=2, le=2**15, description="nodes of the cycle")
    hops: int = Field(2, ge=1, le=2**10, description="steps from the node asked about to the answer")
    vocab: int = Field(64, ge=3, le=2**20, description="number of token ids; the last is the mark before a question")


@task(
    "hops",
    source='"Physics of Language Models", part 4.1 (SSRN 5240330)',
    summary="the node some steps along a cycle whose edges are given in random order",
)
class Hops(Task):
    """Edges as pairs of nodes, then questions: a mark and a node, where the target is the node `hops` steps later."""

    Config = HopsConfig
    axes = ("length", "nodes", "hops")

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.config.vocab)

    def check(self) -> None:
        """Raise ConfigError if edges and a question do not fit, or tokens are too few."""
        c = self.config
        if c.length < 2 * c.nodes + 2:
            raise ConfigError(
                f"the edges of {c.nodes} nodes and a question do not fit into length {c.length}; "
                f"set length to {2 * c.nodes + 2} or more."
            )
        if c.vocab <= c.nodes:
            raise ConfigError(
                f"a vocabulary of {c.vocab} has no tokens for {c.nodes} nodes and a mark; "
                f"set vocab to {c.nodes + 1} or more."
            )

    def grid(self) -> tuple[Cell, ...]:
        """Return 1 to 8 steps, powers of two as in the paper's tests, in cycles of our choice."""
        return tuple({"length": 64, "nodes": 16, "hops": hops} for hops in (1, 2, 4, 8))

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        cycle = draws.distinct("nodes", c.nodes, c.vocab - 1)
        order = draws.distinct("order", c.nodes, c.nodes)
        edges = np.arange(c.nodes)[None]
        questions = (c.length - 2 * c.nodes) // 2
        starts = draws.below("starts", questions, c.nodes)
        canvas.inputs.fill(c.vocab - 1)
        canvas.write(2 * edges, np.take_along_axis(cycle, order, axis=1), Role.KEY, order)
        canvas.write(2 * edges + 1, np.take_along_axis(cycle, (order + 1) % c.nodes, axis=1), Role.VALUE, order)
        numbers = np.arange(questions)[None]
        asked = 2 * c.nodes + 2 * numbers + 1
        canvas.write(asked - 1, c.vocab - 1, Role.SEPARATOR)
        canvas.write(asked, np.take_along_axis(cycle, starts, axis=1), Role.QUERY, starts)
        canvas.ask(asked, np.take_along_axis(cycle, (starts + c.hops) % c.nodes, axis=1), numbers)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return where the edges lead from each node asked about."""
        edges = inputs[: 2 * self.config.nodes].tolist()
        after = dict(zip(edges[::2], edges[1::2], strict=True))
        found: Answers = {}
        for place in asked.tolist():
            node = int(inputs[place])
            for _ in range(self.config.hops):
                node = after[node]
            found[place] = frozenset({node})
        return found
