"""Copying and selective copying: repeat tokens, in their order, after a mark.

Copying is defined by arXiv 1511.06464, section 4.1; selective copying by arXiv 1706.02761 in the form of arXiv
2312.00752, section 4.1.1; MAD's form as coded in athms/mad-lab at 0f49a45, mad/data/instances.py
(`generate_copying_instance`) with configs/tasks. Modes do not differ.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Task, TaskConfig, task
from basecap.tasks._draws import Draws, Ints
from basecap.tasks._instances import Canvas, Role
from basecap.tasks.mad_recall import suite_cells


class CopyingConfig(TaskConfig):
    """Options of copying."""

    length: int = Field(256, ge=3, le=2**20, description="tokens of an example, the copy's places included")
    tokens: int = Field(16, ge=1, le=2**19, description="tokens to copy")
    vocab: int = Field(16, ge=3, le=2**20, description="number of token ids; the last two are blank and the mark")
    spread: Literal["start", "uniform", "insertion"] = Field(
        "start",
        description="where tokens stand: at the start; anywhere; or, as MAD codes it, with each blank put in before a "
        "random one of the tokens, so that the last token ends the context",
    )


@task(
    "copying",
    source="arXiv 1511.06464",
    summary="repeat tokens that stand at the start",
    variants={
        "selective-copying": ("repeat tokens that stand anywhere among blanks", {"spread": "uniform"}),
        "mad-selective-copying": ("the same with the blanks of MAD's generator", {"spread": "insertion"}),
    },
)
class Copying(Task):
    """Tokens and blanks, a mark, then as many blanks as tokens: the answer at the j-th of these is the j-th token."""

    Config = CopyingConfig
    axes = ("length", "tokens", "vocab")

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocab

    def check(self) -> None:
        """Raise ConfigError when tokens, mark and copy do not fit into the length."""
        c = self.config
        if c.length < 2 * c.tokens + 1:
            raise ConfigError(
                f"{c.tokens} tokens and their copy do not fit into length {c.length}; set {2 * c.tokens + 1} or more."
            )

    def grid(self) -> tuple[Cell, ...]:
        """Return the cell of arXiv 2312.00752, for MAD's form the baseline and changes of its suite."""
        if self.config.spread != "insertion":
            return ({"length": 4096, "tokens": 16, "vocab": 16},)
        return suite_cells(
            {"length": 256, "tokens": 16, "vocab": 16},
            {"vocab": (32, 64, 128), "length": (512, 1024), "tokens": (32, 64, 96)},
        )

    def make(self, draws: Draws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c = self.config
        mark = c.length - c.tokens - 1
        numbers = np.arange(c.tokens)
        places = numbers[None]
        if c.spread == "uniform":
            places = np.sort(draws.slots("places", c.tokens, mark), axis=1)
        elif c.spread == "insertion":
            before = draws.below("blanks", mark - c.tokens, c.tokens)  # the token that each blank is put in before
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
        """Return the tokens that are neither blank nor mark, in their order."""
        tokens = [token for token in inputs.tolist() if token < self.config.vocab - 2]
        return {place: frozenset({token}) for place, token in zip(asked.tolist(), tokens, strict=True)}
