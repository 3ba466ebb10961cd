"""Where the jobs of a study run: in this process one after the other, or in processes side by side.

Under `torchrun` all processes do each job together.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from basecap.errors import ConfigError, Interrupted
from basecap.plan.runs import RunSpec, plan_evaluations
from basecap.plan.workloads import material_of
from basecap.records import StudyRecords
from basecap.registry import load_plugin
from basecap.run.evaluation_job import Point, evaluate_point
from basecap.run.jobs import KILLED, Execution, Failure, Runtime, lacks_memory
from basecap.run.provenance import starting_info
from basecap.run.training_job import train_run
from basecap.run.trial import try_run
from basecap.system import environment
from basecap.system.processes import WorkerKilled, WorkerPool
from basecap.system.progress import share_terminal, write_line
from basecap.train.distributed import Processes
from basecap.train.interruption import deferred, immediate, install


class Executor(ABC):
    """Tries and trains runs, and evaluates stored weights."""

    @abstractmethod
    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Failure | None]]:
        """Try runs; see `basecap.run.trial`."""

    @abstractmethod
    def train(self, runs: Sequence[RunSpec]) -> list[dict[str, Any]]:
        """Return each run's info; raises Interrupted when a signal came, after a checkpoint."""

    @abstractmethod
    def evaluate(
        self, points: Sequence[Point], show: Callable[[str], None]
    ) -> Iterator[tuple[Point, Mapping[str, Failure]]]:
        """Evaluate stored weights; yield each point with the evaluations that failed. `show` takes messages."""


def devices_for(chosen: torch.device, asked: str | None, world: int, per_device: int) -> list[str]:
    """Return the devices of the jobs of this process, one for each that runs at a time; the GPUs take turns.

    Raises:
        ConfigError: several jobs at a time under `torchrun`.
    """
    if per_device > 1 and world > 1:
        raise ConfigError("under torchrun all processes do each job together; leave out --per-device.")
    every = chosen.type == "cuda" and asked is None and world == 1
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if every else [str(chosen)]
    return devices * per_device


def executor_for(
    execution: Execution, runtime: Runtime, devices: Sequence[str]
) -> contextlib.AbstractContextManager[Executor]:
    """Return the executor for one or for several devices; with several, processes live until the context is left."""
    if len(devices) > 1:
        return ProcessExecutor(execution, devices, runtime.log)
    return contextlib.nullcontext(SequentialExecutor(runtime))


class SequentialExecutor(Executor):
    """Does jobs in this process, or in all processes of its group together."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime

    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Failure | None]]:
        """Try runs; see `basecap.run.trial`."""
        for run in runs:
            yield run, try_run(run, self.runtime)

    def train(self, runs: Sequence[RunSpec]) -> list[dict[str, Any]]:
        """Return each run's info; raises Interrupted when a signal came, after a checkpoint."""
        infos = []
        for run in runs:
            with deferred():  # a signal waits for a checkpoint, or for the record that the run is finished
                infos.append(train_run(run, self.runtime))
        return infos

    def evaluate(
        self, points: Sequence[Point], show: Callable[[str], None]
    ) -> Iterator[tuple[Point, Mapping[str, Failure]]]:
        """Evaluate stored weights; yield each point with the evaluations that failed."""
        for point in points:
            yield point, evaluate_point(point, self.runtime, show)


class ProcessExecutor(Executor):
    """Does jobs in processes of this machine, one per device, which live until the context is left.

    A killed process fails its own job only, which is recorded and logged; another process replaces it. A context that
    is left because of a signal passes it on to the processes and waits for them to write their checkpoints.
    """

    def __init__(self, execution: Execution, devices: Sequence[str], log: Callable[[str], None]):
        """Take what the jobs share and a device for each process; a process starts with its first job."""
        self.execution = execution
        self.log = log
        self.crowded = len(set(devices)) < len(devices)
        threads = max(1, torch.get_num_threads() // len(devices))
        self.pool = WorkerPool(_begin, [replace(execution, device=device, threads=threads) for device in devices])

    def __enter__(self) -> "ProcessExecutor":
        self.pool.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.pool.__exit__(kind, error, trace)

    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Failure | None]]:
        """Try runs; see `basecap.run.trial`."""
        for run, future in self.pool.run(_try, runs):
            try:
                yield run, future.result()
            except WorkerKilled:
                yield run, Failure(message=f"{KILLED}.")

    def train(self, runs: Sequence[RunSpec]) -> list[dict[str, Any]]:
        """Return each run's info; raises Interrupted when a signal came, after each process wrote a checkpoint.

        A run that found no memory beside others continues after them, alone.
        """
        records = StudyRecords(self.execution.out)
        infos = {run.label: records.run(run.name, run.seed, run.rate).info() for run in runs}
        waiting = [run for run in runs if infos[run.label].get("status") != "finished"]
        infos |= self._train(waiting)
        for run in waiting if self.crowded else ():
            if infos[run.label]["status"] == "failed" and lacks_memory(infos[run.label]["message"]):
                self.log(f"{run.label}: continues with no other run beside it.")
                infos |= self._train([run])
        return [infos[run.label] for run in runs]

    def _train(self, runs: Sequence[RunSpec]) -> dict[str, dict[str, Any]]:
        """Return each run's info by its label."""
        infos = {}
        for run, future in self.pool.run(_train, runs):
            try:
                infos[run.label] = future.result()
            except WorkerKilled:
                infos[run.label] = _record_killed(self.execution, run, self.log)
        return infos

    def evaluate(
        self, points: Sequence[Point], show: Callable[[str], None]
    ) -> Iterator[tuple[Point, Mapping[str, Failure]]]:
        """Evaluate stored weights; yield each point with the evaluations that failed."""
        for point, future in self.pool.run(_evaluate, points):
            try:
                yield point, future.result()
            except WorkerKilled:
                yield point, {", ".join(point.evaluations): Failure(message=f"{KILLED}.")}


def _record_killed(execution: Execution, run: RunSpec, log: Callable[[str], None]) -> dict[str, Any]:
    records = StudyRecords(execution.out).run(run.name, run.seed, run.rate)
    info = {**starting_info(records, run, torch.device(execution.device)), **records.info()}
    if info["status"] == "finished":  # killed after it recorded that and before it answered
        return info
    info |= {"status": "failed", "message": f"{KILLED}; the run resumes from its last checkpoint."}
    info.pop("traceback", None)  # of an earlier failure
    records.write_info(info)
    log(f"{run.label} failed: {info['message']}")
    return info


#: What the jobs of a worker share.
_runtime: list[Runtime] = []


def _begin(execution: Execution) -> None:
    share_terminal()
    device = environment.choose_device(execution.device)
    if execution.device == "cpu" and execution.threads is not None:
        torch.set_num_threads(execution.threads)  # more threads than cores would wait for each other
    install(deferring=True)  # between jobs the parent ends this process
    for plugin, digest in execution.plugins.items():
        load_plugin(plugin, digest)
    _runtime[:] = [
        Runtime(
            records=StudyRecords(execution.out),
            device=device,
            workloads=material_of(execution.study, execution.out).workloads(),
            evaluations=plan_evaluations(execution.study),
            group=Processes(),
            log=write_line,
        )
    ]


def _try(run: RunSpec) -> Failure | None:
    with deferred(), immediate():  # there is no checkpoint to write
        return try_run(run, _runtime[0])


def _train(run: RunSpec) -> dict[str, Any]:
    try:
        with deferred():
            info = train_run(run, _runtime[0])
    except Interrupted as interrupted:
        write_line(str(interrupted))
        raise
    _free_cache()
    return info


def _evaluate(point: Point) -> dict[str, Failure]:
    with deferred(), immediate():  # what is recorded stays
        failures = evaluate_point(point, _runtime[0])
    _free_cache()
    return failures


def _free_cache() -> None:
    torch.cuda.empty_cache()  # other processes on the same GPU cannot use what this one caches
