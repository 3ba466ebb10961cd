"""Looking at a study more than once: how the probability of a wrong verdict is spent over the looks.

Each look at a growing study is another chance to be wrong. Of the whole level a look may use what a spending function
has grown by since the look before: a fiftieth of the level at once, the rest as the square of the share of the seeds
that the study may have in the end (Kim and DeMets, Biometrika 74, 1987). The levels of all looks add up to the whole,
so that what any of them says is wrong with at most that probability, however the looks depend on each other.

No look is planned that would get less than the fiftieth: what a level as small as that of 2 of 50 seeds (0.00008 of
0.05) says would rest on a few draws of errors, and could not decide anything.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, model_validator

from basecap.analysis.study_files import parse
from basecap.records import StudyRecords

POWER = 2
#: The share of the level that the first look may spend whatever its seeds are, and that each look should get at least.
FIRST = 0.02


class Looks(BaseModel):
    """The looks at a study that grows until its rows are decided, as looks.json holds them.

    Attributes:
        most: seeds that the study may have in the end.
        looks: seeds at each look, ascending.
        behind: architectures that got no more seeds after the last look, as they need more tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    most: int = Field(ge=2)
    looks: tuple[int, ...] = Field(min_length=1)
    behind: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _looks_ascend(self) -> "Looks":
        if list(self.looks) != sorted({*self.looks}) or not 1 <= self.looks[0] <= self.looks[-1] <= self.most:
            raise ValueError(f"looks should ascend from 1 to {self.most} at most")
        return self

    @classmethod
    def read(cls, records: StudyRecords) -> "Looks | None":
        """Return the looks at a study, None for one without --until-decided; raises DataError for a damaged file."""
        content = records.looks()
        return None if content is None else parse(content, cls, records.path / "looks.json")

    def at(self, seeds: int) -> "Looks":
        """Return these looks and one at `seeds`, which may be the last of them again."""
        return (
            self if self.looks[-1] == seeds else Looks(most=self.most, looks=(*self.looks, seeds), behind=self.behind)
        )

    def level(self, level: float) -> float:
        """Return the level of the last look, of `level` for all looks."""
        return level_of_last_look(self.looks, self.most, level)


def level_of_last_look(looks: Sequence[int], most: int, level: float) -> float:
    """Return the level at which the intervals of the last look are made.

    Args:
        looks: seeds of the study at each look, ascending.
        most: seeds that it may have in the end.
        level: probability of a wrong interval over all looks.

    >>> level_of_last_look([2, 4], 4, 0.05)
    0.03675
    """
    spent = [FIRST + (1 - FIRST) * min(1.0, seeds / most) ** POWER for seeds in looks]
    return level * (spent[-1] - (spent[-2] if len(spent) > 1 else 0.0))


def next_look(seeds: int, most: int) -> int:
    """Return the seeds of the look after one with `seeds`: half as many again, or what `FIRST` asks, at most `most`.

    >>> next_look(2, 8), next_look(2, 50)
    (3, 8)
    """
    worth = math.ceil((seeds**POWER + most**POWER * FIRST / (1 - FIRST)) ** (1 / POWER))
    return min(most, max(seeds + max(1, seeds // 2), worth))


#: The seeds of each architecture that a study plans, in its study.yaml.
Plan = Mapping[str, Sequence[int]]


class Tables(BaseModel):
    """The plans of a study at which a table of its results was made, each other than the one before: tables.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    planned: tuple[dict[str, list[int]], ...] = ()

    @classmethod
    def read(cls, records: StudyRecords) -> "Tables":
        """Return those of a study; raises DataError for a damaged file."""
        content = records.tables()
        return cls() if content is None else parse(content, cls, records.path / "tables.json")

    def seen(self, plan: Plan) -> "Tables":
        """Return these and one at `plan`, which may be the last of them again."""
        own = {name: list(seeds) for name, seeds in plan.items()}
        return self if self.planned and self.planned[-1] == own else Tables(planned=(*self.planned, own))


@dataclass(frozen=True, kw_only=True)
class AddedRuns:
    """Runs that a study did not plan when a table of it was made, so that each table was another chance to be wrong.

    Attributes:
        runs: their seeds by architecture.
        tables: how many tables were made without some of them.
        confidence: with which all intervals of all these tables and the last one hold, at least.
    """

    runs: dict[str, list[int]]
    tables: int
    confidence: float


def added_runs(tables: Tables, plan: Plan, compared: Iterable[tuple[str, int]], level: float) -> AddedRuns | None:
    """Return which of the `compared` runs were added after a table, None if none was.

    What the study's own plan lacks counts as added after one table at least: it was trained by hand. A planned run that
    a table lacked, as it was not trained yet, is not added: no table decided that it is. Each table was made at
    `level`; together they are wrong with no more than the sum of their levels.
    """
    found, without = set(compared), 0
    added: set[tuple[str, int]] = set()
    for planned in (*tables.planned, plan):
        missing = {run for run in found if run[1] not in planned.get(run[0], ())}
        added |= missing
        without += bool(missing) and planned != plan
    if not added:
        return None
    names = sorted({name for name, _ in added})
    runs = {name: sorted(seed for who, seed in added if who == name) for name in names}
    count = max(1, without)
    return AddedRuns(runs=runs, tables=count, confidence=max(0.0, 1 - level * (count + 1)))
