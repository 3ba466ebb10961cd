"""What the jobs of a study share within one process, and how the failure of a job is reported."""

import gc
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from basecap.errors import BasecapError
from basecap.evals import Evaluation
from basecap.plan.checks import message_with_place
from basecap.plan.runs import RunSpec
from basecap.plan.workloads import Workloads
from basecap.records import RunRecords, StudyRecords
from basecap.run.resources import Resources
from basecap.study.config import StudyConfig
from basecap.train.distributed import Processes, SharedError

logger = logging.getLogger("basecap.study")

#: Why a job failed whose worker was killed.
KILLED = "its process was killed, possibly out of memory; free memory and run the same command again"

#: What the message of a trial says whose step found too little memory.
NO_ROOM = "do not fit into the memory"

#: Words of errors when memory is full: on a GPU in an allocation, in a kernel or in a library of NVIDIA; on a CPU, in
#: Python, and of trials.
NO_MEMORY = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator", "MemoryError", NO_ROOM)
#: Bytes that a process takes on a GPU beside its tensors: its context, kernels and the workspace of libraries.
CONTEXT = 2**30
#: The share of a GPU's memory that other processes may hold before a job that lacks memory lacks theirs.
LITTLE = 0.1


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """Why a job failed: a message, the traceback of an unexpected error, the implementation of each op."""

    message: str
    traceback: str | None = None
    ops: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a trial of a run found.

    Attributes:
        failure: why the run cannot train.
        untested: what was not tested for leaks, and why, for an architecture from a plugin.
        step_seconds: seconds of a training step by the threads of the CPU, if that was timed.
    """

    failure: JobFailure | None = None
    untested: tuple[str, ...] = ()
    step_seconds: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What every run of a study shares. It crosses process boundaries, so it holds no open file and no tensor.

    Attributes:
        study: what is run.
        out: its directory.
        device: where models are.
        plugins: each plugin file with the digest of the code that this command loaded.
        on: what its jobs run on.
        threads: the most that a process may use for operations on the CPU.
        compilers: the processes that one may compile with.
        service: the directory of CUDA's Multi-Process Service, see `basecap.system.mps`.
        compiled: a directory in which processes note whose blocks are compiled, see `first_alone`.
        profile: the first and last step of each run to trace.
    """

    study: StudyConfig
    out: Path
    device: str
    plugins: Mapping[Path, str] = field(default_factory=dict)
    on: Resources = field(default_factory=Resources)
    threads: int | None = None
    compilers: int = 1
    service: Path | None = None
    compiled: Path | None = None
    profile: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What the jobs of a study use within one process.

    Attributes:
        records: of the study.
        device: where models are.
        workloads: what they train on and are tested on.
        evaluations: what is measured at evaluation points.
        group: the processes that train each run together.
        log: takes sentences for the terminal.
        compiled, profile: see `Execution`.
    """

    records: StudyRecords
    device: torch.device
    workloads: Workloads
    evaluations: Sequence[Evaluation]
    group: Processes
    log: Callable[[str], None]
    compiled: Path | None = None
    profile: tuple[int, int] | None = None

    def run_records(self, run: RunSpec) -> RunRecords:
        """Return the records of a run; touches no file."""
        return self.records.run(run.name, run.seed, run.rate)


def free_memory(device: torch.device) -> None:
    """Free what an ended job left on a GPU: models in reference cycles, and what PyTorch caches for this process."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def obtainable(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU that this process has reserved or could have, and all it has."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device), total


def lacks_memory(message: str) -> bool:
    """Whether a job failed because a device or this machine had no room; PyTorch has no one error for that."""
    return any(words in message for words in NO_MEMORY)


def lacks_memory_of_machine(message: str) -> bool:
    """Whether it was this machine that had no room, or may have been."""
    return lacks_memory(message) and bool(re.search(r"\bMemoryError|DefaultCPUAllocator|was killed", message))


def held_elsewhere(device: torch.device) -> str | None:
    """Say how much of a GPU's memory this process could have, where others hold much of it; None where they do not."""
    if device.type != "cuda":
        return None
    try:
        ours, total = obtainable(device)
    except RuntimeError:  # there is no room even for a context, without which CUDA does not tell
        return f"{device} had none free, as other processes hold it; the same command tries again."
    if total - ours - CONTEXT < LITTLE * total:
        return None
    share = f"{ours / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return f"{device} had {share} free, as other processes hold the rest; the same command tries again."


def varying_operation(message: str) -> str | None:
    """Return PyTorch's name of the operation without a deterministic form that a job failed of, or None."""
    found = re.search(r"(\w+) does not have a deterministic implementation", message)
    return None if found is None else found[1]


def describe_failure(error: BaseException, device: torch.device) -> JobFailure:
    """Return the message of an error that is being handled, with the line of a plugin that it came through.

    Where `device` had no room because other processes hold its memory, it says that instead.
    """
    expected = isinstance(error.__cause__ if isinstance(error, SharedError) else error, BasecapError | None)
    message = message_with_place(error)
    if lacks_memory(message) and not lacks_memory_of_machine(message) and (held := held_elsewhere(device)):
        message = f"out of memory: {held}"
    return JobFailure(message=message, traceback=None if expected else traceback.format_exc())


def report_failure(what: str, failure: JobFailure, log: Callable[[str], None]) -> None:
    """Log why something failed, and its traceback for --debug."""
    log(f"{what}: {failure.message}")
    if failure.traceback is not None:
        logger.debug(failure.traceback)
