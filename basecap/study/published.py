"""The published numbers that a study of tasks names, to be shown beside its own."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from basecap.data.config import Count, Line, Number
from basecap.tasks import build_task


class PublishedValue(BaseModel):
    """One published number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    architecture: Line = Field(description="entry of the study; the report says which of them has no run here")
    train: Line | None = Field(None, description="training task; the only one when not given")
    test: Line | None = Field(None, description="test task; the training task when not given")
    length: Count | None = Field(None, description="of a cell; the mean over cells when not given")
    pairs: Count | None = Field(None, description="of a cell, likewise")
    value: Number = Field(ge=0, le=100, description="in percent")

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


class PublishedSection(BaseModel):
    """Numbers that a report shows beside those of the study; no run depends on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Line = Field(description="where they are published, such as arXiv 2410.15678, Table 1")
    metric: Literal["accuracy", "case_accuracy"] = Field(
        "accuracy", description="what they are: share of right values, or of examples without a wrong one"
    )
    values: tuple[PublishedValue, ...] = Field(min_length=1, description="the numbers")

    @field_validator("values")
    @classmethod
    def _places_differ(cls, value: tuple[PublishedValue, ...]) -> tuple[PublishedValue, ...]:
        places = [number.place for number in value]
        for place in places:
            if places.count(place) > 1:
                raise ValueError(f"{', '.join(str(part) for part in place if part is not None)} stands twice; keep one")
        return value
