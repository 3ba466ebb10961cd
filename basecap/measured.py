"""Measured numbers and what an evaluation declares about them."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict

#: Which direction of a number is better.
Better = Literal["lower", "higher", "neither"]

#: Keys of a record that its row lacks where it has none.
OPTIONAL = ("unit", "better", "data")


@dataclass(frozen=True)
class Declaration:
    """Describes the numbers of an evaluation, so that a report can draw them.

    `axes` names the quantities that its records vary over (such as "length"); empty for a single number. A record may
    have another unit and direction.
    """

    name: str
    unit: str
    better: Better
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """One measured number: `metric` of evaluation `eval` on `subset` after `step` steps (`tokens` tokens).

    `n` is the number of averaged values, `stderr` has the unit of `value`, `axis` is the place on each declared axis.
    `unit` and `better` are None where they are those of the declaration. `data` describes what was measured on where
    that does not follow from the study, such as the data set and hash of a downstream task.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    tokens: int
    eval: str
    subset: str
    metric: str
    value: float
    n: int
    stderr: float | None = None
    axis: dict[str, float] = field(default_factory=dict)
    unit: str | None = None
    better: Better | None = None
    data: str | None = None

    @property
    def key(self) -> tuple:
        """Identity of the number: a later record with the same key replaces an earlier one."""
        return self.step, self.eval, self.subset, self.metric, tuple(sorted(self.axis.items())) if self.axis else ()

    def row(self) -> dict[str, Any]:
        """Return the row of evals.jsonl, without the keys that few records have where this one has none."""
        row = asdict(self)
        return {key: value for key, value in row.items() if value is not None or key not in OPTIONAL}
