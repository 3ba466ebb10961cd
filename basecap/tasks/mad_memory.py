"""MAD's memory tasks: learn a fixed table, and compress a sequence into one position.

Defined by arXiv 2403.17844. As coded in athms/mad-lab at 0f49a45, mad/data/instances.py
(`generate_memorization_instance`, `generate_compression_instance`) with configs/tasks. As coded, compression also asks
for the marker itself, which every example ends with; memorisation is the same in both modes.
"""

from functools import cached_property

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Task, TaskConfig, task
from basecap.tasks._draws import ExampleDraws, Ints, key_of
from basecap.tasks._instances import Canvas, Role
from basecap.tasks.mad_recall import suite_cells

_SOURCE = "arXiv 2403.17844"


class MemorisationConfig(TaskConfig):
    """Options of memorisation."""

    length: int = Field(32, ge=2, le=2**20, description="tokens of an example: keys, each with a marker")
    vocab: int = Field(256, ge=4, le=2**20, description="number of token ids: keys, values, marker")
    table: int = Field(12345, ge=0, le=2**63 - 1, description="seed of the table, the same for all seeds of examples")


@task("mad-memorisation", source=_SOURCE, summary="values of a fixed table that no example shows")
class Memorisation(Task):
    """Keys, each followed by a marker; the target at the marker is the key's value in a table fixed for the task.

    The values are distinct. They are not in the input and can only be learned from targets.
    """

    Config = MemorisationConfig
    axes = ("length", "vocab")

    @property
    def vocabulary(self) -> int:
        """Number of token ids; the last is the marker."""
        return self.config.vocab

    @cached_property
    def table(self) -> Ints:
        """The value of every key: int64 [keys], all distinct."""
        keys = (self.config.vocab - 1) // 2
        draws = ExampleDraws(key_of("table", self.config.table), np.zeros(1, dtype=np.int64))
        return keys + draws.distinct("values", keys, self.config.vocab - 1 - keys)[0]

    def check(self) -> None:
        """Raise ConfigError for an odd length."""
        if self.config.length % 2:
            raise ConfigError(f"length {self.config.length} is odd; set an even length.")

    def grid(self) -> tuple[Cell, ...]:
        """Return the baseline and variations of MAD's suite."""
        return suite_cells({"length": 32, "vocab": 256}, {"vocab": (512, 1024, 2048, 4096, 8192)})

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        keys = draws.below("keys", self.config.length // 2, len(self.table))
        places = 2 * np.arange(keys.shape[1])[None]
        canvas.write(places, keys, Role.KEY, keys)
        canvas.write(places + 1, self.config.vocab - 1, Role.QUERY, keys)
        canvas.ask(places + 1, self.table[keys], np.arange(keys.shape[1]))

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the value of the previous token in the table."""
        return {place: frozenset({int(self.table[inputs[place - 1]])}) for place in asked.tolist()}


class CompressionConfig(TaskConfig):
    """Options of compression."""

    length: int = Field(32, ge=2, le=2**20, description="tokens of an example, including the marker")
    vocab: int = Field(16, ge=2, le=2**20, description="number of token ids; the last is the marker")


@task("mad-compression", source=_SOURCE, summary="decode all tokens from the output at the last position")
class Compression(Task):
    """Random tokens and a marker; every token is its own target, decoded from the activations at the marker.

    The task would be trivial if targets were predicted at their own positions, so `readout` is "last". In mode paper
    the marker is a target as well.
    """

    Config = CompressionConfig
    revision = 2
    axes = ("length", "vocab")
    readout = "last"

    @property
    def vocabulary(self) -> int:
        """Number of token ids; the last is the marker."""
        return self.config.vocab

    def grid(self) -> tuple[Cell, ...]:
        """Return the baseline and variations of MAD's suite, except those of the number of training examples."""
        return suite_cells({"length": 32, "vocab": 16}, {"vocab": (32, 64, 128), "length": (64, 128, 256)})

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        last = self.config.length - 1
        places = np.arange(last)
        canvas.write(places[None], draws.below("tokens", last, self.config.vocab - 1), Role.VALUE, places)
        canvas.write(np.array([[last]]), self.config.vocab - 1, Role.QUERY)
        asked = np.arange(self.config.length if self.config.mode == "paper" else last)
        canvas.ask(asked[None], canvas.inputs[:, asked], asked)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the tokens themselves."""
        return {place: frozenset({int(inputs[place])}) for place in asked.tolist()}
