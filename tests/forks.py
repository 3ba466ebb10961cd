"""Processes that have imported everything: starting Python with PyTorch takes seconds, and so does its first step."""

import contextlib
import io
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from basecap.cli import main
from basecap.testing import fresh_process

FORKS = multiprocessing.get_context("forkserver")
#: The first step of an optimiser imports torch._dynamo, the command `run` basecap.run.execute.
IMPORTED = ("torch._dynamo", "basecap.run.execute", "tests.train.interruptions", "tests.train.two_processes")
#: Below the ports that Linux gives to connections, where two processes at once were seen to choose the same.
PORTS = (20_000, 32_000)
FORKS.set_forkserver_preload([__name__, *IMPORTED])


def _call(function: Callable[..., None], arguments: tuple, output: Path, variables: dict[str, str]) -> None:
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(variables)
    torch.set_num_threads(1)
    function(*arguments)


def start(function: Callable[..., None], *arguments: object, output: Path, **variables: str):
    """Call a function in a process, which is returned; stdout and stderr go to the file `output`."""
    process = FORKS.Process(target=_call, args=(function, arguments, output, variables))
    process.start()
    return process


def command(*arguments: object) -> None:
    """Run the command line."""
    sys.argv = ["basecap", *map(str, arguments)]
    main()


def _answer(connection: Connection) -> None:
    sys.stdin = io.StringIO(connection.recv_bytes().decode())
    with tempfile.TemporaryFile() as output, open(os.devnull, "wb") as nowhere:
        os.dup2(output.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        fresh_process.answer()
        output.seek(0)
        connection.send_bytes(output.read())


class Answering:
    """What `FreshProcess` uses of `subprocess.Popen`, for a fork: it has read no plugin file, as a new process."""

    def __init__(self) -> None:
        self._connection, other = FORKS.Pipe()
        self._process = FORKS.Process(target=_answer, args=(other,))
        self._process.start()
        other.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, asked: bytes | None = None, seconds: float | None = None) -> tuple[bytes, None]:
        """Send bytes and return the answer, empty where the process ends without one; raises TimeoutExpired."""
        answer = b""
        if asked is not None:
            self._connection.send_bytes(asked)
            if not self._connection.poll(seconds):
                raise subprocess.TimeoutExpired("a fork", seconds or 0.0)
            with contextlib.suppress(EOFError):
                answer = self._connection.recv_bytes()
        self._process.join()
        return answer, None


def _free_port() -> int:
    """Return a port that nothing listens on, none of those that the system gives to connections at any time."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def pair(function: Callable[..., None], *arguments: object, output: Path, seconds: float) -> str:
    """Call a function in two processes of one group, as torchrun does; return what they printed.

    Raises:
        AssertionError: a process failed, or they took longer than so many seconds; both have ended.
    """
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "test",
    }
    outputs = [output.with_suffix(f".{rank}") for rank in range(2)]
    both = [
        start(function, *arguments, output=path, RANK=str(rank), LOCAL_RANK=str(rank), **variables)
        for rank, path in enumerate(outputs)
    ]
    deadline = time.monotonic() + seconds
    while any(process.is_alive() for process in both) and time.monotonic() < deadline:
        if any(process.exitcode for process in both):  # the other would wait for it
            break
        both[0].join(0.05)
    for process in both:
        process.kill()
        process.join()
    printed = "".join(path.read_text() for path in outputs)
    assert [process.exitcode for process in both] == [0, 0], printed[-3000:]
    return printed
