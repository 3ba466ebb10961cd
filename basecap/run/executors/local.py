"""Executor `local`: jobs run in processes side by side on this machine, or in this process where one runs at a time."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, TypeVar

import torch

from basecap.errors import LostDirectory
from basecap.plan.runs import RunSpec
from basecap.records import RunInfo
from basecap.run.crowding import evaluation_of, failures, memory_of, starts_again, trial_of
from basecap.run.evaluation_job import StoredPoint
from basecap.run.executors import _worker
from basecap.run.executors._contract import Executor, Start, executor
from basecap.run.executors.in_process import InProcessExecutor
from basecap.run.jobs import KILLED, Execution, JobFailure, Runtime, Trial
from basecap.run.provenance import starting_info
from basecap.run.shared_work import train_shared
from basecap.run.sharing import choose
from basecap.system import mps
from basecap.system.processes import Crowded, Kin, Shared, WorkerKilled, WorkerPool, usable_cores

T = TypeVar("T")


@executor("local")
def local(execution: Execution, runtime: Runtime, devices: Sequence[str]) -> Executor:
    """Return the executor for one device or for several."""
    kind: Start = LocalExecutor if len(devices) > 1 else InProcessExecutor
    return kind(execution, runtime, devices)


class LocalExecutor(Executor):
    """Does jobs in processes of this machine, one per device, which live until the context is left.

    A killed process fails its own job only, which is recorded and logged; another process replaces it. A job that lacks
    memory beside others on its device, or on this machine, starts again when one of them has ended, and at last alone
    there. A context that is left because of a signal passes it on to the processes and waits for them to write their
    checkpoints.

    On a GPU a process uses one thread of the CPU, as more only wait for each other, and processes that share a GPU do
    so through CUDA's Multi-Process Service where that can be started.
    """

    def __init__(self, execution: Execution, runtime: Runtime, devices: Sequence[str]):
        """Take what the jobs share and a device for each process; a process starts with its first job."""
        self.execution = execution
        self.runtime = runtime
        self.log = runtime.log
        self.devices = devices
        self.gpus = len({device for device in devices if device != "cpu"})
        self._held = ExitStack()
        self._chosen = execution.on.per_device != "auto"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes, then what they share; raises LostDirectory when the study's directory was moved."""
        self._held.__exit__(kind, error, trace)
        if isinstance(error, LostDirectory):  # the processes said what each of them has written there
            self.runtime.records.refuse_left()

    @cached_property
    def pool(self) -> WorkerPool[Execution]:
        """The processes, and what they share: a service on the GPUs and a directory of notes."""
        shared = replace(
            self.execution,
            threads=1 if self.gpus else max(1, torch.get_num_threads() // len(self.devices)),
            compilers=max(1, usable_cores() // len(self.devices)),
            service=self._held.enter_context(mps.service(self.log)) if 0 < self.gpus < len(self.devices) else None,
            compiled=Path(
                self._held.enter_context(TemporaryDirectory(prefix="basecap-compiled-", ignore_cleanup_errors=True))
            ),
        )
        pool = WorkerPool(_worker.begin, [replace(shared, device=device) for device in self.devices], self.devices)
        if not self._chosen:
            pool.most = self.gpus
        return self._held.enter_context(pool)

    def _choose(self, runs: Sequence[RunSpec]) -> None:
        """Choose how many runs share a GPU, by a run of each architecture."""
        one = {run.architecture: run for run in runs}
        jobs = [future for _, future in self.pool.run(_worker.measure, list(one.values()))]
        found = [future.result() for future in jobs if future.exception() is None]
        if found:
            count, why = choose(found, len(runs), self.gpus)
            self.pool.most = count * self.gpus
            self.log(why)
        self._chosen = True

    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Trial]]:
        """Try runs, see `basecap.run.trial`."""
        for run, future in self.pool.run(_worker.attempt, runs, self._crowded(trial_of)):
            try:
                yield run, future.result()
            except WorkerKilled:
                yield run, Trial(failure=JobFailure(message=f"{KILLED}."))

    def train(self, runs: Sequence[RunSpec]) -> list[RunInfo]:
        """Return each run's info; raises Interrupted when a signal came, after each process wrote a checkpoint."""
        held = {run.label: self.runtime.run_records(run).info() for run in runs}
        infos = {label: info for label, info in held.items() if info is not None and info.finished}
        waiting = [run for run in runs if run.label not in infos]
        if waiting and not self._chosen:
            self._choose(waiting)
        found = train_shared(waiting, self._train, self.runtime)
        infos |= {run.label: info for run, info in zip(waiting, found, strict=True)}
        return [infos[run.label] for run in runs]

    def _train(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, RunInfo | None]]:
        crowded: Crowded[RunSpec, Any] = self._crowded(lambda run: run.label)
        # A process finds the compiled code of its last run in its memory, that of others on the disk.
        for run, future in self.pool.run(_worker.train, runs, crowded, lambda run: Kin(run.seed, run.architecture)):
            try:
                yield run, future.result()
            except WorkerKilled:
                yield run, record_killed(run, self.runtime, KILLED)

    def evaluate(
        self, points: Sequence[StoredPoint], show: Callable[[str], None]
    ) -> Iterator[tuple[StoredPoint, Mapping[str, JobFailure]]]:
        """Evaluate stored weights; yield each point with the evaluations that failed."""
        for point, future in self.pool.run(_worker.evaluate, points, self._crowded(evaluation_of)):
            try:
                yield point, future.result()
            except WorkerKilled:
                yield point, dict.fromkeys(point.evaluations, JobFailure(message=f"{KILLED}."))

    def _crowded(self, named: Callable[[T], str]) -> Crowded[T, Any]:
        """Return what tells the pool whose memory a job, which `named` names, lacked beside others."""

        def crowded(item: T, future: "Future[Any]", shared: Collection[Shared]) -> Shared | None:
            error = future.exception()
            if not (error is None or isinstance(error, WorkerKilled)):
                return None
            messages = [KILLED] if error else failures(future.result())
            memory = memory_of(messages)
            again = memory in shared and starts_again(named(item), messages, "when one of them has ended", self.log)
            return memory if again else None

        return crowded


def record_killed(run: RunSpec, runtime: Runtime, why: str) -> RunInfo | None:
    """Record, log and return that a run failed whose process is gone, unless it was finished before that.

    Returns None where another command trains it since.
    """
    records = runtime.run_records(run)
    with runtime.records.claimed(records) as mine:
        if not mine:
            return None
        info = records.info() or starting_info(records, run, runtime.device)
        if info.finished:  # killed after it recorded that and before it answered
            return info
        info = info.failed(f"{why}; the run resumes from its last checkpoint.")
        records.write_info(info)
    runtime.log(f"{run.label} failed: {info.message}")
    return info
