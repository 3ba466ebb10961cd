"""Locks of directories between processes on one machine."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from basecap.errors import ConfigError
from basecap.system.foreign import open_file, open_to_append

#: Seconds between two looks at a lock that another process holds.
POLL = 0.1


@contextmanager
def locked(directory: Path, busy: str | None = None) -> Iterator[None]:
    """Hold the lock of a directory, which is created; the lock ends with the process.

    Args:
        directory: directory of the file `lock`.
        busy: message of the ConfigError when another process holds the lock; None waits for that process.

    Raises DataError when the lock is a link or no regular file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open_to_append(directory / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if busy is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(busy) from error
        yield


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the lock of a directory; creates no file."""
    try:
        with open_file(directory / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


@contextmanager
def first_alone(directory: Path, name: str, stopped: Callable[[], bool]) -> Iterator[None]:
    """Let one of several processes go through the context alone, the others wait for it and follow side by side.

    For work that fills a cache. If the first one fails, the next of those that wait is alone.

    Args:
        directory: exists, and belongs to these processes alone.
        name: of the work, as part of a file name.
        stopped: whether to stop waiting.
    """
    done = directory / f"{name}.done"
    with (directory / f"{name}.lock").open("w") as file:
        while not done.exists() and not stopped():
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(POLL)
        if done.exists():
            fcntl.flock(file, fcntl.LOCK_UN)
        yield
        done.touch()
