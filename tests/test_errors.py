"""Sentences for names that do not exist, for invalid values and for exceptions."""

import pytest
from pydantic import BaseModel, Field, ValidationError

from basecap.errors import describe_error, describe_problem, nearest

KNOWN = ["mamba-2", "RWKV-7", "transformer++"]


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("mamba2", KNOWN, "did you mean 'mamba-2'?"),
        ("MAMBA-2", KNOWN, "did you mean 'mamba-2'?"),
        ("rwkv7", KNOWN, "did you mean 'RWKV-7'?"),
        ("hyena", KNOWN, "choose from RWKV-7, mamba-2, transformer++."),
        ("hyena", (), "there are none."),
        (7, ["8"], "choose from 8."),
    ],
)
def test_the_nearest_name_is_suggested_else_all(name: str, known: list[str], hint: str):
    assert nearest(name, known) == hint


def test_a_command_is_named_in_place_of_a_long_list():
    assert nearest("hyena", KNOWN, see="basecap list mixers") == "see `basecap list mixers`."
    assert nearest("mamba", KNOWN, see="basecap list mixers") == "did you mean 'mamba-2'?"


class Options(BaseModel, extra="forbid"):
    count: int = 1
    rate: float = 1.0
    name: str = Field("a", min_length=1)
    lengths: tuple[int, ...] = Field((1,), min_length=1, max_length=2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"count": "many"}, "should be a whole number"),
        ({"count": 1.5}, "should be a whole number"),
        ({"rate": "fast"}, "should be a number"),
        ({"name": 5}, "should be text; a number or a date is text in quotes"),
        ({"name": ""}, "should not be empty"),
        ({"lengths": 5}, "should be a list"),
        ({"lengths": []}, "should be a list with 1 or more entries"),
        ({"lengths": [1, 2, 3]}, "should be a list with 2 entries at most"),
    ],
)
def test_a_value_of_another_kind_is_described_without_python(values: dict, words: str):
    with pytest.raises(ValidationError) as caught:
        Options(**values)
    assert describe_problem(caught.value.errors()[0]) == words


def test_an_exception_is_its_class_and_first_line():
    assert describe_error(ValueError("odd width\nmore")) == "ValueError: odd width"
    assert describe_error(MemoryError()) == "MemoryError"
