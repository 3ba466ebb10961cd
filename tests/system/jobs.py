"""What the workers of test_processes.py do; a worker imports this file and nothing that takes long."""

import os
import signal
import time
from pathlib import Path

#: What `begin` was called with in this process.
STARTS: list[str] = []


def begin(start: str) -> None:
    STARTS.append(start)


def refuse(start: str) -> None:
    """Fail like a worker that cannot begin."""
    raise ValueError(f"cannot begin {start}")


def report(item: int) -> tuple[int, list[str], int]:
    """Return the item, the starts of this process and its number."""
    return item, STARTS, os.getpid()


def divide(item: int) -> float:
    return 12 / item


def nap(item: int) -> int:
    time.sleep(0.05)
    return item


def end_at_zero(item: int) -> int:
    """Return the item; zero kills the worker."""
    if item == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def end_once(path: str) -> str:
    """Kill the worker unless the file exists, which is created first; return the name of the file."""
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Path(path).name


def wait_for(paths: tuple[str, str]) -> str:
    """Create the second file as soon as the first exists; return the name of the second."""
    first, second = map(Path, paths)
    while not first.exists():
        time.sleep(0.005)
    second.touch()
    return second.name


def blocked(_: int) -> set[int]:
    """Return the signals that this process does not receive."""
    return {*signal.pthread_sigmask(signal.SIG_BLOCK, [])}
