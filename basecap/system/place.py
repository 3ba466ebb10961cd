"""The directory that a process works in: whether its path still leads to it, and where it is now."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from basecap.errors import LostDirectory
from basecap.system.locks import Held


class Place:
    """A directory with a lock file, which is the same one as long as its path leads to the same lock file."""

    def __init__(self, directory: Path):
        """Open both; raises LostDirectory when one is not there."""
        self.directory = directory
        #: Locks that this process holds in it and must hold to write.
        self.held: list[Held] = []
        try:
            self._lock = os.open(directory / "lock", os.O_RDONLY)
            self._directory = os.open(directory, os.O_RDONLY)
        except FileNotFoundError as error:
            raise LostDirectory(f"{self.whereabouts(None)}.") from error

    def close(self) -> None:
        """Close both; then the path counts as leading there."""
        os.close(self._lock)
        os.close(self._directory)
        self._lock = self._directory = -1

    @property
    def left(self) -> bool:
        """Whether the path leads elsewhere or nowhere now; a disk that does not answer is no reason to think so."""
        try:
            return not _same(self.directory / "lock", self._lock)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def refuse_left(self) -> None:
        """Raise LostDirectory when the path leads elsewhere or nowhere, or another process took a lock of this one."""
        taken = [lock.path.name for lock in self.held if lock.lost]  # as all locks are of a directory that was moved
        if self.left:
            raise LostDirectory(f"{self.whereabouts(self.found())}.")
        for lock in taken:
            name = f"{self.directory} ({lock})"
            raise LostDirectory(f"another process took over a run in {name}, as this one did not answer; run again.")

    def whereabouts(self, found: Path | None) -> str:
        """Return what happened to the directory and what to do, without a full stop; it is at the path `found` now."""
        if found is None:
            return f"{self.directory} was moved, removed or replaced while it was in use; run again"
        if found == self.directory:
            return f"the lock of {found} was removed while it was in use; run the same command again"
        return f"{self.directory} was moved to {found} while it was in use; run again with --out {found}"

    def found(self) -> Path | None:
        """Return the present path of the directory, None where it was removed or the system does not say."""
        with suppress(OSError):
            if _same(self.directory, self._directory):  # its lock file was removed
                return self.directory
        if sys.platform != "linux":
            return None
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{self._directory}"))
            if _same(path, self._directory):
                return path
        return None


def _same(path: Path, descriptor: int) -> bool:
    return os.path.samestat(path.stat(), os.fstat(descriptor))


@contextmanager
def watched(directory: Path) -> Iterator[Place]:
    """Yield a directory with a lock file as a `Place`, closed at the end; raises LostDirectory when it is not there."""
    place = Place(directory)
    try:
        yield place
    finally:
        place.close()
