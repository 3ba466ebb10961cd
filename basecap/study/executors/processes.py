"""Tries and trains runs side by side in processes of this machine, one or several per device."""

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import torch

from basecap import environment
from basecap.errors import ConfigError, Interrupted
from basecap.processes import end_with_parent
from basecap.progress import share_terminal
from basecap.records import StudyRecords
from basecap.registry import load_plugin
from basecap.study.plan import RunSpec, plan_evaluations
from basecap.study.provenance import starting_info
from basecap.study.training_job import Execution, Runtime, train_run
from basecap.study.trial import Failure, try_run
from basecap.study.workloads import material_of
from basecap.train.distributed import Processes
from basecap.train.interruption import deferred, immediate, install

#: Why a run failed whose process was killed.
KILLED = "its process was killed, possibly out of memory; free memory and run the same command again"


def devices_for(chosen: torch.device, asked: str | None, world: int, per_device: int) -> list[str]:
    """Return where the runs of this process go, a device for each that goes at a time; the GPUs take turns."""
    if per_device > 1 and world > 1:
        raise ConfigError("under torchrun all processes train each run together; leave out --per-device.")
    every = chosen.type == "cuda" and asked is None and world == 1
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if every else [str(chosen)]
    return devices * per_device


class ProcessExecutor:
    """Tries and trains runs in processes of this machine, one per device, which live until the context is left.

    A process that is killed costs its own run alone, which is recorded and said; another takes its place. A context
    that is left because of a signal passes it on to the processes, and waits for them to write their checkpoints.
    """

    def __init__(self, execution: Execution, devices: Sequence[str], log: Callable[[str], None] = print):
        """Take what the runs share and a device for each process; a process starts when it is needed."""
        self.execution = execution
        self.log = log
        self.pools = contextlib.ExitStack()
        threads = max(1, torch.get_num_threads() // len(devices))
        shares = [replace(execution, device=device, threads=threads) for device in devices]
        self.free = deque(_Worker(share, self.pools) for share in shares)

    def __enter__(self) -> "ProcessExecutor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Interrupted):
            for process in multiprocessing.active_children():
                os.kill(process.pid or 0, error.number)
        self.pools.close()

    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Failure | None]]:
        """Try runs; see `basecap.study.trial`."""
        for run, future in self._done(_try, runs):
            try:
                yield run, future.result()
            except BrokenProcessPool:
                yield run, Failure(message=f"{KILLED}.", traceback=None, ops={})

    def train(self, runs: Sequence[RunSpec]) -> list[dict[str, Any]]:
        """Train runs; a process takes the next one when it has finished one. Returns each run's info."""
        records = StudyRecords(self.execution.out)
        infos = {run.label: records.run(run.name, run.seed, run.rate).info() for run in runs}
        waiting = [run for run in runs if infos[run.label].get("status") != "finished"]
        for run, future in self._done(_train, waiting):
            try:
                infos[run.label] = future.result()
            except BrokenProcessPool:
                infos[run.label] = _killed(self.execution, run, self.log)
        return [infos[run.label] for run in runs]

    def _done(self, job: Callable[[RunSpec], Any], runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Future]]:
        """Do a job for each run in a process that is free; yield the runs as their jobs end."""
        waiting = deque(runs)
        running: dict[Future, tuple[RunSpec, _Worker]] = {}
        while waiting or running:
            while waiting and self.free:
                run, worker = waiting.popleft(), self.free.popleft()
                running[worker.take(job, run)] = run, worker
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, worker = running.pop(future)
                self.free.append(worker)
                yield run, future


class _Worker:
    """One process, started when it is needed and again when it was killed: a pool of its own, so that it is known."""

    def __init__(self, execution: Execution, pools: contextlib.ExitStack):
        self.execution = execution
        self.pools = pools
        self.pool: ProcessPoolExecutor | None = None

    def take(self, job: Callable[[RunSpec], Any], run: RunSpec) -> Future:
        if self.pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                return self.pool.submit(job, run)
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, _begin_worker, (self.execution,))
        self.pools.callback(self.pool.shutdown, cancel_futures=True)
        return self.pool.submit(job, run)


def _killed(execution: Execution, run: RunSpec, log: Callable[[str], None]) -> dict[str, Any]:
    records = StudyRecords(execution.out).run(run.name, run.seed, run.rate)
    info = {**starting_info(records, run, torch.device(execution.device)), **records.info()}
    if info["status"] == "finished":  # it ended between its last word and the answer
        return info
    info |= {
        "status": "failed",
        "message": f"{KILLED}, which resumes from its last checkpoint.",
    }
    info.pop("traceback", None)  # of an earlier failure
    records.write_info(info)
    log(f"{run.label} failed: {info['message']}")
    return info


#: What the jobs of a worker share, from its start on.
_worker: list[Runtime] = []


def _begin_worker(execution: Execution) -> None:
    end_with_parent()
    share_terminal()
    device = environment.choose_device(execution.device)
    if execution.device == "cpu" and execution.threads is not None:
        torch.set_num_threads(execution.threads)  # more than there are cores would wait for each other
    install(deferring=True)  # between runs the parent ends this process
    for plugin in execution.plugins:
        load_plugin(plugin)
    _worker[:] = [
        Runtime(
            records=StudyRecords(execution.out),
            device=device,
            workloads=material_of(execution.study, execution.out).workloads(),
            evaluations=plan_evaluations(execution.study),
            group=Processes(),
            log=_print,
        )
    ]


def _try(run: RunSpec) -> Failure | None:
    with deferred(), immediate():  # there is no checkpoint to write
        return try_run(run, _worker[0])


def _train(run: RunSpec) -> dict[str, Any]:
    try:
        with deferred():
            info = train_run(run, _worker[0])
    except Interrupted as interrupted:
        _print(str(interrupted))
        raise
    torch.cuda.empty_cache()  # what this process keeps is missing to those that share the GPU
    return info


def _print(line: str) -> None:
    print(line, flush=True)
