"""Locks of directories between processes on one machine."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from basecap.errors import ConfigError


@contextmanager
def locked(directory: Path, busy: str | None = None) -> Iterator[None]:
    """Hold the lock of a directory, which is created; the lock ends with the process.

    Args:
        directory: directory of the file `lock`.
        busy: message of the ConfigError when another process holds the lock; None waits for that process.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if busy is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(busy) from error
        yield


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the lock of a directory; creates no file."""
    try:
        with (directory / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
