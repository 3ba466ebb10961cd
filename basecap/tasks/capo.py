"""Capo: facts about many people, seen again and again in training; how many bits of them do parameters hold?

The data set bioS(N) of "Physics of Language Models", part 3.3 (arXiv 2404.05405), the task Capo of its part 4.1 (SSRN
5240330): N people with names that differ, drawn from 400 x 400 x 1000, and facts drawn independently: pronoun, birth
day of 12 x 28 x 200, city of birth, university, field of study, company. The numbers of values are those of the lists
in facebookresearch/PhysicsLM4 at 7580696, data-synthetic-pretrain/Capo-bioS-bioR. Here a part of a name and a fact are
one token each, in one order, without sentences around them. The city of the company, which follows from the company, is
left out: it holds no bits. Both modes are the same.
"""

from functools import cached_property
from math import log2, prod

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Facts, Task, TaskConfig, task
from basecap.tasks._draws import ExampleDraws, Ints, key_of
from basecap.tasks._instances import NOTHING, Canvas, Role

#: Names are codes below this number, which draws can tell apart.
_MOST_NAMES = 2**31


class CapoConfig(TaskConfig):
    """Options of capo."""

    length: int = Field(64, ge=4, le=2**20, description="tokens of an example")
    people: int = Field(10_000, ge=1, le=2**24, description="number of people")
    names: tuple[int, ...] = Field(
        (400, 400, 1000), min_length=1, strict=False, description="numbers of parts of names: first, middle, last"
    )
    values: tuple[int, ...] = Field(
        (2, 12, 28, 200, 200, 300, 100, 263), min_length=1, strict=False, description="number of values of each fact"
    )
    table: int = Field(
        12345, ge=0, le=2**63 - 1, description="seed of names and facts, the same for all seeds of examples"
    )


@task(
    "capo",
    source='"Physics of Language Models", part 3.3 (arXiv 2404.05405)',
    summary="facts about people that no example explains: bits learned per parameter",
)
class Capo(Task):
    """Blanks, then people: a mark, the parts of a name, then the facts; each token of a person is the next target.

    Facts are scored; parts of names are trained and not scored. People of an example differ. Person i has the same name
    and facts in every cell.
    """

    Config = CapoConfig
    axes = ("length", "people")

    @property
    def vocabulary(self) -> int:
        """Parts of names, values, mark and blank."""
        return sum(self._sizes) + 2

    @property
    def facts(self) -> Facts:
        """The people, and the bits of a name and of the facts about a person."""
        c = self.config
        return Facts(people=c.people, name_bits=log2(prod(c.names)), fact_bits=log2(prod(c.values)))

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (*self.config.names, *self.config.values)

    @property
    def _starts(self) -> Ints:
        """The first token of each part of a name and of each fact: int64 [parts]."""
        return np.cumsum([0, *self._sizes[:-1]])

    @property
    def _width(self) -> int:
        return 1 + len(self._sizes)

    def check(self) -> None:
        """Raise ConfigError if no person fits into the length, or there are too few people or names."""
        c, each = self.config, self.config.length // self._width
        if each == 0:
            raise ConfigError(
                f"a mark, a name and {len(c.values)} facts do not fit into length {c.length}; set length to "
                f"{self._width} or more."
            )
        if min(self._sizes) < 1:
            raise ConfigError(f"names and values must be 1 or more each, not {list(self._sizes)}; change them.")
        count = prod(c.names)
        if not c.people <= count <= _MOST_NAMES:
            raise ConfigError(
                f"{c.people:,} people need as many names and at most {_MOST_NAMES:,}, and names {list(c.names)} make "
                f"{count:,}; change names or people."
            )
        if c.people < each:
            raise ConfigError(f"{each} people fit into length {c.length} and there are {c.people}; raise people.")

    def grid(self) -> tuple[Cell, ...]:
        """Return the four smallest numbers of people of the paper; a study of capacity trains on one of them."""
        return tuple({"length": 64, "people": people} for people in (10_000, 20_000, 50_000, 100_000))

    @cached_property
    def _names(self) -> Ints:
        """The code of each person's name: int64 [people], all distinct."""
        draws = ExampleDraws(key_of("names", self.config.table), np.zeros(1, dtype=np.int64))
        return draws.distinct("names", self.config.people, prod(self.config.names))[0]

    @cached_property
    def _by_name(self) -> Ints:
        """The numbers of people in the order of the codes of their names: int64 [people]."""
        return np.argsort(self._names)

    def _person(self, numbers: Ints) -> Ints:
        """Return the tokens of people: int64 [P, parts of a name and facts]."""
        draws = ExampleDraws(key_of("facts", self.config.table), numbers)
        parts = np.unravel_index(self._names[numbers], self.config.names)
        facts = [draws.below(f"fact {index}", 1, size)[:, 0] for index, size in enumerate(self.config.values)]
        return np.stack([*parts, *facts], axis=1) + self._starts

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c, width, parts = self.config, self._width, len(self.config.names)
        count = c.length // width
        people = draws.distinct("people", count, c.people)
        canvas.inputs.fill(self.vocabulary - 1)
        for number in range(count):
            tokens = self._person(people[:, number])
            first = c.length - (count - number) * width
            places = first + np.arange(width)[None]
            canvas.write(places[:, :1], self.vocabulary - 2, Role.SEPARATOR, number)
            canvas.write(places[:, 1 : parts + 1], tokens[:, :parts], Role.KEY, number)
            canvas.write(places[:, parts + 1 :], tokens[:, parts:], Role.VALUE, number)
            canvas.ask(places[:, :parts], tokens[:, :parts], NOTHING)
            groups = number * len(c.values) + np.arange(len(c.values))[None]
            canvas.ask(places[:, parts:-1], tokens[:, parts:], groups)

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the facts about the people named before, as the table has them."""
        parts = len(self.config.names)
        offsets = (asked - self.config.length % self._width) % self._width
        firsts, of_place = np.unique(asked - offsets, return_inverse=True)
        names = inputs[firsts[:, None] + 1 + np.arange(parts)] - self._starts[:parts]
        codes = np.ravel_multi_index(tuple(names.T), self.config.names)
        numbers = self._by_name[np.searchsorted(self._names, codes, sorter=self._by_name)]
        tokens = self._person(numbers)[of_place, offsets]
        return {place: frozenset({token}) for place, token in zip(asked.tolist(), tokens.tolist(), strict=True)}
