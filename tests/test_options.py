"""Options become an object of their class, or one sentence that names the option and what it belongs to."""

import re

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from basecap.errors import ConfigError
from basecap.options import configured


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int
    rate: float | None = None
    lengths: tuple[int, ...] = ()
    causal: bool = True
    chunk: int = Field(16, ge=1)

    @field_validator("chunk")
    @classmethod
    def even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("should be even")
        return value


def test_values_are_taken_and_the_rest_has_its_default():
    found = configured(Options, {"width": 8, "lengths": [1, 2], "causal": False}, "mixer 'x'")
    assert found == Options(width=8, lengths=(1, 2), causal=False) and found.chunk == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widht": 8}, "unknown option 'widht' of mixer 'x': did you mean 'width'?"),
        ({"zzz": 8}, "unknown option 'zzz' of mixer 'x': choose from causal, chunk, lengths, rate, width."),
        ({}, "mixer 'x' needs the option 'width'; add it."),
        ({"width": True}, "option 'width' of mixer 'x' cannot be True: it should be a number, not true or false."),
        ({"width": 8, "rate": False}, "option 'rate' of mixer 'x' cannot be False: it should be a number, not"),
        ({"width": "wide"}, "option 'width' of mixer 'x' cannot be 'wide': it should be a whole number."),
        ({"width": 8, "rate": "high"}, "option 'rate' of mixer 'x' cannot be 'high': it should be a number."),
        ({"width": 8, "lengths": [1, "a"]}, "option 'lengths.1' of mixer 'x' cannot be 'a': it should be a whole"),
        ({"width": 8, "chunk": 0}, "option 'chunk' of mixer 'x' cannot be 0: it should be greater than or equal to 1."),
        ({"width": 8, "chunk": 3}, "option 'chunk' of mixer 'x' cannot be 3: it should be even."),
    ],
)
def test_an_invalid_option_is_named(options: dict, message: str):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        configured(Options, options, "mixer 'x'")
