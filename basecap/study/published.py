"""The sections of a study file about the paper that it follows: its figure and numbers. No run depends on them."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from basecap.data.config import Count, Line, Number
from basecap.study.architectures import Section
from basecap.tasks import build_task

Range = tuple[Number, Number]


class PublishedConfig(Section):
    """Numbers that a paper prints, shown beside ours."""

    source: Line = Field(description="where they are published, and in which unit")
    values: dict[str, tuple[Any, ...]] = Field(
        description="by architecture: of the figure losses pairs of training and test loss, of scores one number (or "
        "null) per column"
    )


class FigureConfig(Section):
    """The figure or table of the paper that the report draws, and its published values."""

    kind: Literal["losses", "entropy", "scores"] = Field(
        description="losses: test loss over smoothed training loss; entropy: influence-entropy over the mixers' option "
        "temperature; scores: a table"
    )
    x: Range | None = Field(None, description="range of the published x axis, drawn at scale paper")
    y: Range | None = Field(None, description="range of the published y axis, likewise")
    columns: tuple[Line, ...] = Field((), description="columns of a table of scores")
    measured: tuple[Line | None, ...] = Field(
        (),
        description="by column of a table of scores, the number that it is: SUBSET METRIC, such as piqa acc_norm, of "
        "the first evaluation that has it, or EVALUATION SUBSET METRIC; either with places on axes, such as S-NIAH "
        "accuracy, length 4096; training speed: tokens per second; with ' / reference' at its end, relative to the "
        "reference; mean: the mean of the row; null: none",
    )
    published: PublishedConfig | None = Field(
        None, description="numbers that the paper prints; the report shows them beside the measured ones"
    )

    @field_validator("x", "y")
    @classmethod
    def _range_ascends(cls, value: Range | None) -> Range | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("should be two numbers, the smaller one first")
        return value

    @model_validator(mode="after")
    def _values_fit(self) -> "FigureConfig":
        values = {} if self.published is None else self.published.values
        if self.measured and len(self.measured) != len(self.columns):
            raise ValueError(f"measured should have {len(self.columns)} entries, one per column")
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


class PublishedNumberSection(Section):
    """One published number."""

    architecture: Line = Field(description="entry of the study; the report says which of them has no run here")
    train: Line | None = Field(None, description="training task; the only one when not given")
    test: Line | None = Field(None, description="test task; the training task when not given")
    length: Count | None = Field(None, description="of a cell; the mean over cells when not given")
    pairs: Count | None = Field(None, description="of a cell, likewise")
    value: Number | None = Field(
        ge=0, le=100, description="in percent; null: a cross, the model did not learn the task"
    )

    @field_validator("train", "test")
    @classmethod
    def _is_a_task(cls, value: str | None) -> str | None:
        if value is not None:
            build_task(value)
        return value

    @property
    def place(self) -> tuple[str | int | None, ...]:
        """What the number is of."""
        return self.architecture, self.train, self.test or self.train, self.length, self.pairs


class PublishedSection(Section):
    """Numbers that a report shows beside those of the study; no run depends on them."""

    source: Line = Field(description="where they are published, such as arXiv 2410.15678, Table 1")
    metric: Literal["accuracy", "case_accuracy"] = Field(
        "accuracy", description="what they are: share of right values, or of examples without a wrong one"
    )
    values: tuple[PublishedNumberSection, ...] = Field(min_length=1, description="the numbers")

    @field_validator("values")
    @classmethod
    def _places_differ(cls, value: tuple[PublishedNumberSection, ...]) -> tuple[PublishedNumberSection, ...]:
        places = [number.place for number in value]
        for place in places:
            if places.count(place) > 1:
                raise ValueError(
                    f"{', '.join(str(part) for part in place if part is not None)} is listed twice; keep one"
                )
        return value
