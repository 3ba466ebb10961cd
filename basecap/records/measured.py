"""Measured numbers and what an evaluation declares about them."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict

#: Which direction of a number is better.
Better = Literal["lower", "higher", "neither"]

#: The unit of a share of `n` answers that are right. Reports give it an interval.
ANSWERS = "share of answers"

#: Keys that a row of evals.jsonl has only if the record has a value for them.
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


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured number.

    Attributes:
        subset: what it was measured on, such as a domain, a task or "layer 3".
        metric: what it is, such as "loss".
        value: the number.
        n: number of averaged items.
        stderr: standard error of `value`.
        axis: place on each axis of the declaration, and on further ones that only records keep. No two numbers of a
            model have the same subset, metric and place.
        unit: None for that of the declaration. "share" is shown in percent in a table of scores.
        better: None for the direction of the declaration.
        data: what it was measured on if that does not follow from the study, such as the name and a hash of a data set
            that is downloaded. The report lists it, and says where it differs between runs.
    """

    subset: str
    metric: str
    value: float
    n: int
    stderr: float | None = None
    axis: dict[str, float] = field(default_factory=dict)
    unit: str | None = None
    better: Better | None = None
    data: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record(Measurement):
    """A number that evaluation `eval` measured after `step` steps, `tokens` tokens of training."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    tokens: int
    eval: str

    @property
    def key(self) -> tuple:
        """Identity of the number: a later record with the same key replaces an earlier one."""
        return self.step, self.eval, self.subset, self.metric, tuple(sorted(self.axis.items())) if self.axis else ()

    def row(self) -> dict[str, Any]:
        """Return the row of evals.jsonl, without optional keys that have no value."""
        row = {"step": self.step, "tokens": self.tokens, "eval": self.eval} | asdict(self)
        return {key: value for key, value in row.items() if value is not None or key not in OPTIONAL}
