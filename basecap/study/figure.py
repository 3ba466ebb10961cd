"""The section of a study file that says in which form of a paper its results are drawn; no number depends on it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from basecap.data.config import Line, Number

Range = tuple[Number, Number]


class PublishedConfig(BaseModel):
    """Numbers that a paper prints, shown beside ours."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: Line = Field(description="where they stand, and in which unit")
    values: dict[str, tuple[Any, ...]] = Field(
        description="by architecture: of the figure losses pairs of training and test loss, of scores one number (or "
        "null) per column"
    )


class FigureConfig(BaseModel):
    """In which form."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["losses", "entropy", "scores"] = Field(
        description="losses: test loss over smoothed training loss; entropy: influence-entropy over the mixers' option "
        "temperature; scores: a table"
    )
    x: Range | None = Field(None, description="range of the published x axis, drawn at scale paper")
    y: Range | None = Field(None, description="range of the published y axis, likewise")
    columns: tuple[Line, ...] = Field((), description="columns of a table of scores")
    published: PublishedConfig | None = Field(None, description="numbers that the paper prints, shown beside ours")

    @field_validator("x", "y")
    @classmethod
    def _range_ascends(cls, value: Range | None) -> Range | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("should be two numbers, the smaller one first")
        return value

    @model_validator(mode="after")
    def _values_fit(self) -> "FigureConfig":
        values = {} if self.published is None else self.published.values
        if values and self.kind == "entropy":
            raise ValueError("a figure of entropies has no published values; remove them")
        for name, row in values.items():
            if self.kind == "losses" and not all(_is_pair(item) for item in row):
                raise ValueError(f"published values of {name!r} should be pairs [training loss, test loss]")
            if self.kind == "scores" and not (len(row) == len(self.columns) and all(_is_number(one) for one in row)):
                raise ValueError(f"published values of {name!r} should be {len(self.columns)} numbers, one per column")
        return self


def _is_pair(item: Any) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2 and None not in item and all(map(_is_number, item))


def _is_number(item: Any) -> bool:
    return item is None or (isinstance(item, int | float) and not isinstance(item, bool))
