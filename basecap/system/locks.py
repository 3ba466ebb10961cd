"""Locks between processes, on one machine or on several that share a file system.

A lock is a lease: a file with the host, the process and a heartbeat, which outlives a killed process. Others take it
once its heartbeat has not changed for LEASE seconds of their own clock; the clocks of hosts may differ. Where the file
system has flock, a file beside the lease is locked first, which ends with the process. That file says which lease is
its holder's, so that the lease of a killed holder counts for nothing as soon as the file is free. Hosts without flock,
as some mount a network disk, see the lease alone.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from basecap.errors import ConfigError
from basecap.system.foreign import open_file, open_to_append, refuse_link

if TYPE_CHECKING:
    from filelock import SoftFileLease

#: Seconds between two looks at a lock that another process holds.
POLL = 0.1
#: Seconds without a heartbeat after which a lease ends. A holder renews it three times in that time.
LEASE = 60.0
#: End of the names of leases.
ENDING = ".lease"
#: Leases that this process found busy: they know since when a heartbeat is silent.
_BUSY: dict[Path, "SoftFileLease"] = {}
#: When this process saw the heartbeat of a lease change: its inode and time of change, and seconds of this clock.
_SEEN: dict[Path, tuple[tuple[int, int], float]] = {}


class Busy(ConfigError):
    """Another process holds a lock."""


class Held:
    """A lock that this process holds."""

    def __init__(self, path: Path):
        """Take its lease."""
        self.path = path
        self._file = path.stat()

    @property
    def lost(self) -> bool:
        """Whether another process took it, because this one was stopped for longer than a lease lasts."""
        try:
            return not os.path.samestat(self.path.stat(), self._file)
        except FileNotFoundError:
            return True
        except OSError:  # a disk that does not answer is no reason to think so
            return False


@contextmanager
def locked(directory: Path, busy: str | None = None, name: str = "lock", keep: bool = True) -> Iterator[Held]:
    """Hold a lock in a directory, which is created.

    Args:
        directory: of the lock's file.
        busy: message when another process holds the lock; None waits for that process.
        name: of the file.
        keep: whether the file stays after this; a lease never does.

    Raises:
        Busy: another process holds the lock.
        DataError: the lock is a link or no regular file.
        OSError: it cannot be written.
    """
    import filelock  # 40 ms

    directory.mkdir(parents=True, exist_ok=True)
    path, lease = directory / name, directory / f"{name}{ENDING}"
    refuse_link(lease)
    flock, held = _has_flock(directory), ExitStack()
    try:
        if flock:
            open_to_append(path).close()
            lock = filelock.FileLock(path, fallback_to_soft=False)
            held.enter_context(lock.acquire(blocking=busy is None, poll_interval=POLL))
            if not keep:
                held.callback(path.unlink, missing_ok=True)  # who waits for this file sees that it is gone
            if _is_left(path, lease):
                lease.unlink(missing_ok=True)
        soft = _BUSY.pop(lease, None) or filelock.SoftFileLease(lease, lease_duration=LEASE)
        try:
            held.enter_context(soft.acquire(blocking=busy is None, poll_interval=POLL))
        except filelock.Timeout:
            _BUSY[lease] = soft
            raise
        if flock:
            with open_to_append(path) as file:
                file.truncate(0)
                file.write(f"{soft.token}\n".encode())
        yield Held(lease)
    except filelock.Timeout as error:
        raise Busy(busy) from error
    finally:
        with suppress(OSError):  # such as a disk that is read-only now: all is done, and a lease ends by itself
            held.close()


def _is_left(path: Path, lease: Path) -> bool:
    """Whether a lease is that of the last holder of the file at `path`, which is free: it was killed."""
    with suppress(OSError), open_file(path) as file:
        token = file.read(100).decode(errors="replace").strip()
        return bool(token) and f"token={token}" in lease.read_text(errors="replace").splitlines()
    return False


def _has_flock(directory: Path) -> bool:
    """Whether flock works on the files of a directory; leaves no file."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_locked(directory: Path, name: str = "lock") -> bool:
    """Return whether a process holds a lock in a directory; creates no file.

    A lease counts as held until this process has seen no heartbeat for LEASE seconds, unless its holder was killed that
    had locked the file beside it.
    """
    path, lease = directory / name, directory / f"{name}{ENDING}"
    with suppress(FileNotFoundError), open_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no flock, so nothing is locked by it
            return _is_leased(lease)
        if _is_left(path, lease):
            return False
    return _is_leased(lease)


def _is_leased(path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    heartbeat, now = (found.st_ino, found.st_mtime_ns), time.monotonic()
    if path not in _SEEN or _SEEN[path][0] != heartbeat:
        _SEEN[path] = heartbeat, now
    return now - _SEEN[path][1] < LEASE


def remove_ended(directory: Path, prefix: str) -> None:
    """Remove the files of locks whose names begin with `prefix` and whose processes were killed."""
    for path in directory.glob(f"{prefix}*"):
        with suppress(Busy, OSError), locked(directory, "it is held", path.name.removesuffix(ENDING), keep=False):
            pass


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
