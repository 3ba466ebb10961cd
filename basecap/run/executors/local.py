"""Executor `local`: jobs run in processes side by side on this machine, or in this process where one runs at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from basecap.plan.runs import RunSpec
from basecap.records import StudyRecords
from basecap.run.evaluation_job import Point
from basecap.run.executors import _worker
from basecap.run.executors._contract import Executor, Start, executor
from basecap.run.executors.in_process import InProcessExecutor
from basecap.run.jobs import KILLED, Execution, Failure, Runtime, lacks_memory
from basecap.run.provenance import starting_info
from basecap.system.processes import WorkerKilled, WorkerPool


@executor("local")
def local(execution: Execution, runtime: Runtime, devices: Sequence[str]) -> Executor:
    """Return the executor for one device or for several."""
    kind: Start = LocalExecutor if len(devices) > 1 else InProcessExecutor
    return kind(execution, runtime, devices)


class LocalExecutor(Executor):
    """Does jobs in processes of this machine, one per device, which live until the context is left.

    A killed process fails its own job only, which is recorded and logged; another process replaces it. A context that
    is left because of a signal passes it on to the processes and waits for them to write their checkpoints.
    """

    def __init__(self, execution: Execution, runtime: Runtime, devices: Sequence[str]):
        """Take what the jobs share and a device for each process; a process starts with its first job."""
        self.execution = execution
        self.log = runtime.log
        self.crowded = len(set(devices)) < len(devices)
        threads = max(1, torch.get_num_threads() // len(devices))
        self.pool = WorkerPool(
            _worker.begin, [replace(execution, device=device, threads=threads) for device in devices]
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the processes."""
        self.pool.__exit__(kind, error, trace)

    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Failure | None]]:
        """Try runs, see `basecap.run.trial`."""
        for run, future in self.pool.run(_worker.attempt, runs):
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
        for run, future in self.pool.run(_worker.train, runs):
            try:
                infos[run.label] = future.result()
            except WorkerKilled:
                infos[run.label] = _record_killed(self.execution, run, self.log)
        return infos

    def evaluate(
        self, points: Sequence[Point], show: Callable[[str], None]
    ) -> Iterator[tuple[Point, Mapping[str, Failure]]]:
        """Evaluate stored weights; yield each point with the evaluations that failed."""
        for point, future in self.pool.run(_worker.evaluate, points):
            try:
                yield point, future.result()
            except WorkerKilled:
                yield point, dict.fromkeys(point.evaluations, Failure(message=f"{KILLED}."))


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
