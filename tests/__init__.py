"""The tests. Their processes, but those that they start anew, write without waiting for the disk."""

import os


def _unforced(descriptor: int) -> None:
    """Refuse what is no open file, as `os.fsync` does; the machine goes on when a process of a test is killed."""
    os.fstat(descriptor)


os.fsync = _unforced
