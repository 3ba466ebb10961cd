"""Errors a user can fix: one sentence that says what is wrong and what to do."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

#: Error types of pydantic to messages that need no knowledge of Python.
_MESSAGES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "should be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "should be true or false"),
    **dict.fromkeys(("model_type", "dict_type"), "should be a section, with a value for each key"),
    **dict.fromkeys(("tuple_type", "list_type"), "should be a list"),
    "int_parsing_size": "is too large",
    "missing": "is missing",
    "string_pattern_mismatch": "should be one line, without control characters",
    "unexpected_keyword_argument": "is unknown",
    "string_unicode": "is not text in UTF-8",
    "string_too_short": "should not be empty",
    "string_type": "should be text; a number or a date is text in quotes",
}


class BasecapError(Exception):
    """Invalid input or a state the user can fix; the command line prints it without a traceback, exit code 2."""


class ConfigError(BasecapError):
    """An invalid study, option or name."""


class DataError(BasecapError):
    """Text or token files that are missing, damaged or too small."""


class CheckpointError(BasecapError):
    """A checkpoint that cannot be read or does not match the model."""


class TrainingError(BasecapError):
    """A run that cannot continue, for example because its loss is no longer finite."""


class LostDirectory(BasecapError):
    """The directory of a study was moved, removed or replaced while a command worked in it."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the work; the command line prints it without a traceback, exit code 128 + signal."""

    def __init__(self, number: int, message: str = "interrupted; run the same command again to resume."):
        """Take the number of the signal and a message, empty when another process prints it."""
        super().__init__(number, message)
        self.number = number
        self.message = message

    def __str__(self) -> str:
        return self.message


def nearest(name: str, known: Iterable[str], see: str | None = None, within: str = "") -> str:
    """Return a hint for an unknown `name`: the nearest valid names, else the command `see` that lists all, else all.

    Names that are suggested begin with `within`, such as the section of a key and a point.

    >>> nearest("mamba2", ["mamba-1", "mamba-2"])
    "did you mean 'mamba-2'?"
    >>> nearest("mamba", ["based", "mamba-1", "mamba-2"])
    "did you mean 'mamba-1' or 'mamba-2'?"
    >>> nearest("token", ["lr", "tokens"], within="train.")
    "did you mean 'train.tokens'?"
    """
    known = sorted(known)
    wanted, folded = str(name).lower(), {one.lower(): one for one in known}
    if best := difflib.get_close_matches(wanted, folded, n=1, cutoff=0.6):
        highest = difflib.SequenceMatcher(None, best[0], wanted).ratio()
        close = {*difflib.get_close_matches(wanted, folded, n=len(folded), cutoff=highest)}
        equal = [repr(within + folded[one]) for one in folded if one in close]
        return f"did you mean {' or '.join(equal)}?"
    if see is not None:
        return f"see `{see}`."
    return f"choose from {', '.join(known)}." if known else "there are none."


def describe_problem(problem: Mapping[str, Any]) -> str:
    """Return the message for a validation error of pydantic, such as "should be a whole number"; no full stop."""
    if problem["type"] == "too_short":
        return f"should be a list with {problem['ctx']['min_length']} or more entries"
    if problem["type"] == "too_long":
        return f"should be a list with {problem['ctx']['max_length']} entries at most"
    return _MESSAGES.get(problem["type"]) or problem["msg"].removeprefix("Value error, ").removeprefix("Input ")


def describe_error(error: BaseException) -> str:
    """Return the class of any error and the first line of its message, such as "ValueError: odd width"."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
