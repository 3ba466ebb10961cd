"""Passkey: recall the digits of a number at a random position of a repeating text.

The synthetic form of RULER's niah_single_1 (arXiv 2404.06654) with token ids instead of English: the haystack is a
repeating cycle of tokens, the needle a name and digits, the question repeats the name. Both modes are the same.
"""

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Task, TaskConfig, task
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import Canvas, Role

#: The first token ids: start and end of the needle, start of the question, then the ten digits.
NEEDLE, END, QUESTION, DIGITS = 0, 1, 2, 3
_NAMES = DIGITS + 10


class PasskeyConfig(TaskConfig):
    """Options of passkey."""

    length: int = Field(256, ge=8, le=2**20, description="tokens of an example, including question and digits")
    digits: int = Field(7, ge=1, le=64, description="digits of the number")
    names: int = Field(64, ge=1, le=2**16, description="number of names")
    haystack: int = Field(25, ge=1, le=2**16, description="tokens of the haystack's cycle")


@task("passkey", source="arXiv 2404.06654", summary="recall the digits of a number in a repeating text")
class Passkey(Task):
    """Haystack with NEEDLE name digits END at a random position, then QUESTION name digits, each digit a target.

    The digits are one queried value.
    """

    Config = PasskeyConfig
    axes = ("length",)

    @property
    def vocabulary(self) -> int:
        """Number of token ids: special tokens, digits, names, haystack."""
        return _NAMES + self.config.names + self.config.haystack

    def check(self) -> None:
        """Raise ConfigError if needle and question do not fit into the length."""
        c = self.config
        need = 2 * c.digits + 4
        if c.length < need:
            raise ConfigError(f"needle and question do not fit into length {c.length}; set length to {need} or more.")

    def grid(self) -> tuple[Cell, ...]:
        """Return lengths from 4k to 100k (our choice: the published ones cannot be read from the figure)."""
        return tuple({"length": length} for length in (4096, 8192, 16_384, 32_768, 65_536, 102_400))

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        needle, question = c.digits + 3, c.length - c.digits - 1
        hay = question - needle
        place = draws.below("place", 1, hay + 1)
        positions = np.arange(c.length)[None]
        walked = np.where(positions < place, positions, positions - needle)
        canvas.inputs[:] = _NAMES + c.names + walked % c.haystack
        name = _NAMES + draws.below("name", 1, c.names)
        digits = DIGITS + draws.below("digits", c.digits, 10)
        parts = np.arange(c.digits)
        canvas.write(place, NEEDLE, Role.SEPARATOR, 0)
        canvas.write(place + 1, name, Role.KEY, 0)
        canvas.write(place + 2 + parts, digits, Role.VALUE, 0)
        canvas.write(place + needle - 1, END, Role.SEPARATOR, 0)
        start = np.array([[question]])
        canvas.write(start, QUESTION, Role.SEPARATOR, 0)
        canvas.write(start + 1, name, Role.QUERY, 0)
        canvas.write(start + 2 + parts[:-1], digits[:, :-1], Role.VALUE, 0)
        canvas.ask(start + 1 + parts, digits, 0)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the digits of the needle."""
        tokens = inputs.tolist()
        start = tokens.index(NEEDLE)
        digits = tokens[start + 2 : tokens.index(END, start)]
        return {place: frozenset({digit}) for place, digit in zip(asked.tolist(), digits, strict=True)}
