"""Errors a user can mend: one sentence that says what is wrong and what to do."""

import difflib
from collections.abc import Iterable


class BasecapError(Exception):
    """Bad input or a state the user can mend; the command line prints it without a traceback, exit code 2."""


class ConfigError(BasecapError):
    """A study, an option or a name that cannot be used."""


class DataError(BasecapError):
    """Text or token files that are missing, damaged or too small."""


class CheckpointError(BasecapError):
    """A checkpoint that cannot be read or does not fit the model."""


class TrainingError(BasecapError):
    """A run that cannot go on, such as a loss that is no longer finite."""


def nearest(name: str, known: Iterable[str], see: str | None = None) -> str:
    """Return a hint for an unknown `name`: the nearest valid one, else the command `see` that lists all, else all.

    >>> nearest("mamba2", ["mamba-1", "mamba-2"])
    "did you mean 'mamba-2'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    if see is not None:
        return f"see `{see}`."
    return f"known: {', '.join(known) or 'none'}"
