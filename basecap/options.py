"""Options of mixers, evaluations and tasks: checked, with errors that name the option."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from basecap.errors import ConfigError, describe_problem, nearest

C = TypeVar("C", bound=BaseModel)

#: Types of options that pydantic would convert true and false to.
NUMBERS = (int, float, int | None, float | None)


def configured(kind: type[C], options: Mapping[str, Any], owner: str) -> C:
    """Return options as a `kind`.

    Args:
        kind: the class of the options.
        options: values by name.
        owner: the entry whose options these are, for messages, such as "task 'mqar'".

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
        first = error.errors()[0]
        option = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ConfigError(f"{owner} needs the option {option!r}; add it.") from error
        given = f"option {option!r} of {owner} cannot be {first['input']!r}"
        raise ConfigError(f"{given}: it {describe_problem(first)}.") from error
