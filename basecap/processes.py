"""Processes on one machine: locks between them, and workers that end with their parent."""

import fcntl
import multiprocessing
import os
import threading
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


def end_with_parent() -> None:
    """End this process when its parent is killed: a worker of a pool alone would wait for the parent forever."""
    threading.Thread(target=_end, daemon=True).start()


def _end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
