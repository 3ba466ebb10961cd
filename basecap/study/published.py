"""The published numbers that a study of tasks names, to be shown beside its own."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from basecap.data.config import Count, Line, Number


class PublishedValue(BaseModel):
    """One published number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    architecture: Line = Field(description="entry of the study")
    train: Line | None = Field(None, description="training task; the only one when not given")
    test: Line | None = Field(None, description="test task; the training task when not given")
    length: Count | None = Field(None, description="of a cell; the mean over cells when not given")
    pairs: Count | None = Field(None, description="of a cell, likewise")
    value: Number = Field(ge=0, le=100, description="in percent")


class PublishedSection(BaseModel):
    """Numbers that a report shows beside those of the study; no run depends on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Line = Field(description="where they are published, such as arXiv 2410.15678, Table 1")
    metric: Literal["accuracy", "case_accuracy"] = Field(
        "accuracy", description="what they are: share of right values, or of examples without a wrong one"
    )
    values: tuple[PublishedValue, ...] = Field(min_length=1, description="the numbers")
