"""CUDA's Multi-Process Service (MPS): with it, processes that share a GPU compute at the same time, not in turns.

A guard, a shell that waits for the end of this process, stops the service: also when this process is killed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
#: Seconds that one answer of the service may take.
PATIENCE = 20.0
#: Waits until its standard input ends, then stops the service and removes its directory.
GUARD = 'cat > /dev/null; echo quit | "$0" > /dev/null 2>&1; rm -rf "$1"'
#: Ends with 0 if a CUDA context can be created: only a first client shows that the service works on this machine.
PROBE = (
    sys.executable,
    "-c",
    "import ctypes as c; d = c.CDLL('libcuda.so.1'); x = c.c_void_p(); "
    "raise SystemExit(bool(d.cuInit(0) or d.cuDevicePrimaryCtxRetain(c.byref(x), 0) or d.cuCtxSetCurrent(x)))",
)


@contextlib.contextmanager
def service(log: Callable[[str], None], probe: Sequence[str] = PROBE) -> Iterator[Path | None]:
    """Run the service within the context, unless it runs already or cannot be started; `log` takes which it is.

    Args:
        log: takes one sentence.
        probe: a command that fails where a client of the service cannot use a GPU.

    Yields:
        The directory that `join` takes in each process that shares a GPU, None without a service of this command.
    """
    program = shutil.which(CONTROL)
    if program is None:
        log(f"Runs on the same GPU take turns: CUDA MPS is not installed ({CONTROL} is not found).")
        yield None
    elif _runs(program):
        log("Runs on the same GPU compute at the same time: CUDA MPS runs on this machine.")
        yield None
    else:
        directory = Path(tempfile.mkdtemp(prefix="basecap-mps-"))  # short, as the path of a socket has to be
        places = [f"CUDA_MPS_PIPE_DIRECTORY={directory}", f"CUDA_MPS_LOG_DIRECTORY={directory}"]
        client = ["env", *places]
        with _guarded([*client, "sh", "-c", GUARD, program, str(directory)], log):
            # it offers all GPUs: each process picks those that CUDA_VISIBLE_DEVICES names among them
            started = _succeeds(["env", "-u", "CUDA_VISIBLE_DEVICES", *places, program, "-d"])
            works = started and _succeeds([*client, *probe])
            if works:
                log("Runs on the same GPU compute at the same time: this command has started CUDA MPS and stops it.")
            else:
                log("Runs on the same GPU take turns: CUDA MPS could not be started.")
            yield directory if works else None


def join(directory: Path) -> None:
    """Let this process use the service of a directory; only before it uses CUDA."""
    os.putenv("CUDA_MPS_PIPE_DIRECTORY", str(directory))  # the driver reads it; it can be named in no option


@contextlib.contextmanager
def _guarded(guard: Sequence[str], log: Callable[[str], None]) -> Iterator[None]:
    """Run a guard that acts when the context is left or this process ends; a signal to the terminal spares it."""
    process = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            log(f"CUDA MPS has not stopped within {PATIENCE:.0f} s; process {process.pid} is still stopping it.")


def _runs(program: str) -> bool:
    """Whether a service answers where processes look for one by default."""
    try:
        found = subprocess.run(
            [program], input="get_server_list\n", capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and "Cannot find" not in found.stdout + found.stderr


def _succeeds(command: Sequence[str]) -> bool:
    """Whether a command ends with 0 in time; its output is discarded, as a daemon keeps what it is given."""
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0
