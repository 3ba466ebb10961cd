"""Processes on one machine: kept out of each other's way, and not outliving the one that started them."""

import fcntl
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from basecap.errors import ConfigError


@contextmanager
def locked(directory: Path, taken: str | None = None) -> Iterator[None]:
    """Let one process at a time into a directory, which is made; a lock ends with its process.

    Args:
        directory: where the file `lock` stands.
        taken: what to say when another process is in there, as a ConfigError; None waits for it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if taken is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(taken) from error
        yield


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the lock of a directory; never makes one."""
    try:
        with (directory / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def end_with_parent() -> None:
    """Let this process not outlive a killed parent: a pool alone would wait for it for ever."""
    threading.Thread(target=_end, daemon=True).start()


def _end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
