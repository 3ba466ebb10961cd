"""Processes that have imported everything: starting Python with PyTorch takes seconds, and so does its first step."""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from basecap.cli import main

FORKS = multiprocessing.get_context("forkserver")
#: The first step of an optimiser imports torch._dynamo, the command `run` basecap.run.execute.
IMPORTED = ("torch._dynamo", "basecap.run.execute", "tests.train.interruptions", "tests.train.two_processes")
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


def pair(function: Callable[..., None], *arguments: object, output: Path, seconds: float) -> str:
    """Call a function in two processes of one group, as torchrun does; return what they printed.

    Raises:
        AssertionError: a process failed, or they took longer than so many seconds; both have ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
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
