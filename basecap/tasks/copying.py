"""Copying and selective copying: repeat tokens in order after a marker.

Copying is defined by arXiv 1511.06464, section 4.1; selective copying by arXiv 1706.02761 in the form of arXiv
2312.00752, section 4.1.1; MAD's form as coded in athms/mad-lab at 0f49a45, mad/data/instances.py
(`generate_copying_instance`) with configs/tasks. Both modes are the same.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Task, TaskConfig, task
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import Canvas, Role
from basecap.tasks.mad_recall import suite_cells


class CopyingConfig(TaskConfig):
    """Options of copying."""

    length: int = Field(256, ge=3, le=2**20, description="tokens of an example, including the positions of the copy")
    tokens: int = Field(16, ge=1, le=2**19, description="tokens to copy")
    vocab: int = Field(16, ge=3, le=2**20, description="number of token ids; the last two are blank and marker")
    spread: Literal["start", "uniform", "insertion"] = Field(
        "start",
        description="positions of the tokens: start; uniform; or insertion, as in MAD's code, where each blank is "
        "inserted before a random token, so that the context ends with the last token",
    )


@task(
    "copying",
    source="arXiv 1511.06464",
    summary="repeat the tokens at the start",
    variants={
        "selective-copying": ("repeat tokens at random positions among blanks", {"spread": "uniform"}),
        "mad-selective-copying": ("selective-copying with the blanks of MAD's generator", {"spread": "insertion"}),
    },
)
class Copying(Task):
    """Tokens and blanks, a marker, then a blank per token; the target at the j-th last blank is the j-th token."""

    Config = CopyingConfig
    axes = ("length", "tokens", "vocab")

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocab

    def check(self) -> None:
        """Raise ConfigError if tokens, marker and copy do not fit into the length."""
        c = self.config
        if c.length < 2 * c.tokens + 1:
            raise ConfigError(
                f"{c.tokens} tokens and their copy do not fit into length {c.length}; "
                f"set length to {2 * c.tokens + 1} or more."
            )

    def grid(self) -> tuple[Cell, ...]:
        """Return the cell of arXiv 2312.00752, or for MAD's form the baseline and variations of its suite."""
        if self.config.spread != "insertion":
            return ({"length": 4096, "tokens": 16, "vocab": 16},)
        return suite_cells(
            {"length": 256, "tokens": 16, "vocab": 16},
            {"vocab": (32, 64, 128), "length": (512, 1024), "tokens": (32, 64, 96)},
        )

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        mark = c.length - c.tokens - 1
        numbers = np.arange(c.tokens)
        places = numbers[None]
        if c.spread == "uniform":
            places = np.sort(draws.slots("places", c.tokens, mark), axis=1)
        elif c.spread == "insertion":
            before = draws.below("blanks", mark - c.tokens, c.tokens)  # the token that each blank is inserted before
            before += np.arange(draws.size)[:, None] * c.tokens
            counts = np.bincount(before.ravel(), minlength=draws.size * c.tokens).reshape(draws.size, c.tokens)
            places = numbers + np.cumsum(counts, axis=1)
        tokens = draws.below("tokens", c.tokens, c.vocab - 2)
        canvas.inputs.fill(c.vocab - 2)
        canvas.write(places, tokens, Role.VALUE, numbers)
        canvas.write(np.array([[mark]]), c.vocab - 1, Role.SEPARATOR)
        answers = mark + 1 + numbers[None]
        canvas.write(answers, c.vocab - 2, Role.QUERY, numbers)
        canvas.ask(answers, tokens, numbers)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the tokens other than blank and marker, in order."""
        tokens = [token for token in inputs.tolist() if token < self.config.vocab - 2]
        return {place: frozenset({token}) for place, token in zip(asked.tolist(), tokens, strict=True)}
