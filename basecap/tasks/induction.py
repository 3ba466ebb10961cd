"""Induction heads: recall the token that followed the first occurrence of a special token.

Defined by arXiv 2209.11895; in the form of arXiv 2212.14052 and 2312.00752, section 4.1.2. Both modes are the same.
"""

import numpy as np
from pydantic import Field

from basecap.tasks._contract import Answers, Cell, Task, TaskConfig, task
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import Canvas, Role


class InductionConfig(TaskConfig):
    """Options of induction heads."""

    length: int = Field(256, ge=3, le=2**20, description="tokens of an example")
    vocab: int = Field(16, ge=2, le=2**24, description="number of token ids; the last is the special token")


@task("induction-heads", source="arXiv 2312.00752", summary="recall the token after a special token")
class Induction(Task):
    """Random tokens with a special token at a random position and at the end; the target follows the first one."""

    Config = InductionConfig
    axes = ("length", "vocab")

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocab

    def grid(self) -> tuple[Cell, ...]:
        """Return the lengths of arXiv 2312.00752, which trains at 256."""
        return tuple({"length": 2**power, "vocab": 16} for power in range(6, 21))

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        canvas.inputs[:] = draws.below("tokens", c.length, c.vocab - 1)
        place = draws.below("place", 1, c.length - 2)
        answer = np.take_along_axis(canvas.inputs, place + 1, axis=1)
        last = np.array([[c.length - 1]])
        canvas.write(place, c.vocab - 1, Role.KEY, 0)
        canvas.write(place + 1, answer, Role.VALUE, 0)
        canvas.write(last, c.vocab - 1, Role.QUERY, 0)
        canvas.ask(last, answer, 0)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the token after the earlier special token."""
        special = np.nonzero(inputs == self.config.vocab - 1)[0]
        return {
            place: frozenset(int(inputs[before + 1]) for before in special if before < place)
            for place in asked.tolist()
        }
