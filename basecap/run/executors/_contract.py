"""The interface of executors: an executor tries and trains runs, and evaluates stored weights."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from basecap.errors import ConfigError
from basecap.plan.runs import RunSpec
from basecap.records import RunInfo
from basecap.registry import Registry
from basecap.run.evaluation_job import StoredPoint
from basecap.run.jobs import Execution, JobFailure, Runtime, Trial
from basecap.run.resources import Resources
from basecap.run.sharing import MOST
from basecap.system import environment


class Executor(AbstractContextManager["Executor"]):
    """Does the jobs of a study. Leaving its context ends the processes that it started.

    Under `torchrun` all processes call its methods with the same arguments and do each job together.
    """

    @abstractmethod
    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Trial]]:
        """Try runs, see `basecap.run.trial`; yield each with what was found."""

    @abstractmethod
    def train(self, runs: Sequence[RunSpec]) -> list[RunInfo]:
        """Train the runs that are not finished; return each run's info in the order of `runs`.

        A run that fails has that in its info. Raises Interrupted when a signal came, after runs in training have
        written a checkpoint.
        """

    @abstractmethod
    def evaluate(
        self, points: Sequence[StoredPoint], show: Callable[[str], None]
    ) -> Iterator[tuple[StoredPoint, Mapping[str, JobFailure]]]:
        """Evaluate stored weights; yield each point with the evaluations that failed, by name.

        Args:
            points: have stored weights.
            show: takes what is being evaluated, where the jobs run in this process.
        """


#: Makes an executor of: what the jobs share, which crosses process boundaries; what they use in this process; and a
#: device for each job at a time, see `devices_for`.
Start = Callable[[Execution, Runtime, Sequence[str]], Executor]
S = TypeVar("S", bound=Start)

EXECUTORS: Registry[Start] = Registry("executor", "basecap.run.executors")
#: Names of the executors whose jobs run on other machines. Their command itself needs no GPU: it works on the CPU, and
#: the jobs choose the device of `Resources` where they run.
REMOTE: set[str] = set()
#: What refuses resources that an executor cannot use, by its name.
REFUSALS: dict[str, Callable[[Resources], None]] = {}
#: What prepares the text of a study with an executor's jobs, by its name; it takes a sentence at a time for the log.
Prepare = Callable[[Execution, Callable[[str], None]], None]
PREPARATIONS: dict[str, Prepare] = {}


def executor(
    name: str,
    *,
    remote: bool = False,
    refuse: Callable[[Resources], None] | None = None,
    prepare: Prepare | None = None,
) -> Callable[[S], S]:
    """Register the decorated class or function as executor `name`: it is called as a `Start`.

    Args:
        name: as `--executor` names it.
        remote: whether its jobs run on other machines than the command.
        refuse: raises ConfigError for resources that it cannot use, before a study is set up.
        prepare: fills the cache of the text by jobs of its own; what it leaves, the command prepares.
    """

    def register(start: S) -> S:
        EXECUTORS.add(name, start, start)
        if remote:
            REMOTE.add(name)
        if refuse is not None:
            REFUSALS[name] = refuse
        if prepare is not None:
            PREPARATIONS[name] = prepare
        return start

    return register


def is_remote(name: str) -> bool:
    """Whether jobs of an executor run on other machines; raises ConfigError for an unknown name."""
    EXECUTORS.get(name)
    return name in REMOTE


def prepare_by_jobs(execution: Execution, log: Callable[[str], None]) -> None:
    """Have the text of a study prepared by jobs, where its executor does so; raises ConfigError where they cannot."""
    if execution.on.executor in PREPARATIONS:
        PREPARATIONS[execution.on.executor](execution, log)


def device_here(on: Resources) -> torch.device:
    """Return the device of this process: that of the jobs where they run on this machine, else the CPU.

    Raises:
        ConfigError: the device or the executor does not exist, the executor cannot use these resources, or no device is
            named and the CPU would be taken only because PyTorch cannot use the GPUs that are here.
    """
    remote = is_remote(on.executor)
    if on.settings and EXECUTORS.built_in(on.executor) and not remote:
        raise ConfigError(f"executor {on.executor} takes no settings; name the executor that they are for.")
    if on.executor in REFUSALS:
        REFUSALS[on.executor](on)
    if on.device is None and not remote and environment.has_unusable_gpus():
        raise ConfigError(
            "PyTorch can use none of this machine's GPUs; check CUDA_VISIBLE_DEVICES, the driver and CUDA MPS where "
            "it runs, or give --device cpu."
        )
    return environment.choose_device("cpu" if remote else on.device)


def devices_for(chosen: torch.device, on: Resources, world: int) -> list[str]:
    """Return the devices of the jobs of this process, one for each that runs at a time; the GPUs take turns.

    With "auto" these are the most that may run, and the executor chooses.

    Args:
        chosen: the device of this process.
        on: what was asked for.
        world: how many processes do each job together.

    Raises:
        ConfigError: a remote executor under `torchrun`; several jobs at a time under `torchrun` or in one process, or
            "auto" without a GPU.
    """
    per_device = on.per_device
    if is_remote(on.executor):
        if world > 1:
            raise ConfigError(f"executor {on.executor} starts processes itself; run the command without torchrun.")
        return [str(chosen)]  # of this process alone; the jobs choose where they run
    if per_device != 1 and on.executor == "in-process":
        raise ConfigError("executor in-process does one job at a time; leave out --per-device.")
    if per_device != 1 and world > 1:
        raise ConfigError("under torchrun all processes do each job together; leave out --per-device.")
    if per_device == "auto" and chosen.type != "cuda":
        raise ConfigError("--per-device auto needs a GPU; on a CPU give a number, such as --per-device 2.")
    every = chosen.type == "cuda" and on.device is None and world == 1
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if every else [str(chosen)]
    return devices * (MOST if per_device == "auto" else per_device)
