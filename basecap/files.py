"""Files: read with one sentence where that fails, written whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from basecap.errors import DataError


def read(path: Path) -> bytes | None:
    """Return the content of a file, None when there is no such file; raises DataError where it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def entries(directory: Path) -> list[Path]:
    """Return what a directory holds, sorted, nothing without it; raises DataError where it cannot be read."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        if not directory.is_file():
            return []
        raise DataError(f"{directory} is a file; give a directory.") from error
    except OSError as error:
        raise _unreadable(directory, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror or error}); mend that and run again.")


@contextlib.contextmanager
def writing(path: Path, other: str = "another directory with --out") -> Iterator[None]:
    """Make the directory of `path`; a full or forbidden disk is a DataError of one sentence.

    Args:
        path: the file that is written.
        other: what the sentence says to give instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}; make room or give {other}.") from error


def settle(directory: Path) -> None:
    """Have the disk hold all files below a directory, so that they outlast a machine that goes down; raises OSError.

    A disk across the network may say only here that it is full.
    """
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, other: str = "another directory with --out") -> Iterator[Any]:
    """Open a file beside `path` for bytes and rename it to `path` when all went well; raises DataError as `writing`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with writing(path, other):
            with partial.open("wb") as file:
                yield file
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # what went wrong has been said
            partial.unlink(missing_ok=True)
