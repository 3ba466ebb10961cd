"""What is wrong with a value of a study file, in words."""

import datetime
import json
import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from basecap.errors import ConfigError
from basecap.options import Problem, problems
from basecap.system.yaml_text import parse_yaml

#: Shows values that are wrong: the beginning of long ones.
_BEGINNING = reprlib.Repr()
_BEGINNING.maxstring, _BEGINNING.maxother, _BEGINNING.maxlevel = 100, 100, 3


def describe_value_error(problem: Problem, section: type[BaseModel], content: dict[str, Any]) -> str:
    """Return the end of a sentence on a value of `content`, which is no `section`; a list is suggested where it works.

    Args:
        problem: what is wrong with the value.
        section: what `content` should be.
        content: the keys of the section.
    """
    if problem.kind != "tuple_type":
        return f"{problem.words}."
    place, value = problem.details["loc"], problem.given
    text = f"[{value if isinstance(value, str) else shown(value)}]"
    try:
        section.model_validate(_changed(content, place, parse_yaml(text)))
        wrong = []
    except ValidationError as error:
        wrong = [one for one in problems(error) if one.details["loc"][: len(place)] == place]
    except ConfigError as error:
        return f"should be a list; {error}"
    except ValueError:  # not YAML
        return "should be a list."
    if not wrong:
        return f"should be a list, such as {text}."
    below, words = wrong[0].details["loc"][len(place) :], wrong[0].words
    if len(below) == 1 and wrong[0].kind == "missing":
        return f"should be a list with {1 + len(wrong)} entries."
    if len(below) == 1:
        return f"should be a list; each entry {words}."
    return f"should be a list, but not {text}: {' '.join(map(str, [*below[1:], words]))}."


def _changed(content: Any, place: Sequence[Any], value: Any) -> Any:
    """Return a copy of nested dicts and lists with another value at a place."""
    if not place:
        return value
    copy = content.copy()
    copy[place[0]] = _changed(content[place[0]], place[1:], value)
    return copy


def shown(value: Any) -> str:
    """Return the beginning of a value as a study file would write it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value) if isinstance(value, datetime.date) else _BEGINNING.repr(value)
