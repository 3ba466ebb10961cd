"""Values that people write, checked: options of mixers, evaluations and tasks, keys of files. Errors name the place."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from basecap.errors import ConfigError, DataError, describe_problem, nearest

C = TypeVar("C", bound=BaseModel)

#: Types of options that pydantic would convert true and false to.
NUMBERS = (int, float, int | None, float | None)


def configured(kind: type[C], options: Mapping[str, Any], owner: str, *, entry: str | None = None) -> C:
    """Return options as a `kind`.

    Args:
        kind: the class of the options.
        options: values by name.
        owner: the entry whose options these are, for messages, such as "task 'mqar'".
        entry: its name, where a study writes it as `NAME: {option: value}`, and the command line behind --add.

    Raises:
        ConfigError: an option is unknown, missing or invalid.
    """
    for key, value in options.items():
        if key not in kind.model_fields:
            raise ConfigError(f"unknown option {key!r} of {owner}: {nearest(key, kind.model_fields)}")
        if isinstance(value, bool) and kind.model_fields[key].annotation in NUMBERS:
            raise ConfigError(
                f"option {key!r} of {owner} cannot be {value!r}: it should be a number, not true or false."
            )
    try:
        return kind(**options)
    except ValidationError as error:
        problem = first_problem(error)
        if problem.kind == "missing":
            example = "" if entry is None else _example(kind, problem.where, entry)
            raise ConfigError(f"{owner} needs the option {problem.where!r}; add it{example}.") from error
        given = f"option {problem.where!r} of {owner} cannot be {problem.given!r}"
        raise ConfigError(f"{given}: it {problem.words}.") from error


def _example(kind: type[BaseModel], option: str, entry: str) -> str:
    """Return the end of a sentence that says how an option of an entry is written."""
    field = kind.model_fields.get(option)
    several = field is not None and get_origin(field.annotation) in (tuple, list)
    written = f"{entry}: {{{option}: {'[...]' if several else '...'}}}"
    return f", as in {written}, or --add '{written}' on the command line"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with checked values."""

    details: ErrorDetails

    @property
    def place(self) -> tuple[int | str, ...]:
        """The keys and indices that lead to the wrong value; alternatives of a type, such as "[list]", are no part."""
        return tuple(part for part in self.details["loc"] if part not in ("[key]", "[number]", "[list]"))

    @property
    def where(self) -> str:
        """The place, such as "train.lr"."""
        return ".".join(map(str, self.place))

    @property
    def kind(self) -> str:
        """The type of the error, as pydantic calls it."""
        return self.details["type"]

    @property
    def given(self) -> Any:
        """The wrong value."""
        return self.details["input"]

    @property
    def words(self) -> str:
        """What is wrong, such as "should be a whole number"; no full stop."""
        return describe_problem(self.details)


def problems(error: ValidationError) -> list[Problem]:
    """Return everything that is wrong with checked values; every sentence about them is made from these."""
    return [Problem(details) for details in error.errors()]


def first_problem(error: ValidationError, before: Collection[str] = ()) -> Problem:
    """Return the first problem of a kind in `before` that an error lists, else its first problem."""
    found = problems(error)
    return next((problem for problem in found if problem.kind in before), found[0])


def damaged(
    path: Path, error: ValidationError, *, rows: bool = False, remedy: str = "restore or remove it"
) -> DataError:
    """Return the error for a file whose content is wrong; with `rows` the first part of a place is its line."""
    problem = first_problem(error)
    place, *rest = problem.place if rows else ("", *problem.place)
    line = f":{int(place) + 1}" if rows else ""
    where = ".".join(map(str, rest))
    return DataError(f"{path}{line} is damaged at {where!r} ({problem.words}); {remedy}.")
