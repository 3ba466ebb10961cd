"""Trains runs side by side in processes of this machine, one or several per device."""

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import torch

from basecap.errors import ConfigError, Interrupted
from basecap.processes import end_with_parent
from basecap.records import StudyRecords
from basecap.registry import load_plugin
from basecap.study.plan import RunSpec, plan_evaluations
from basecap.study.preparing import material_of
from basecap.study.provenance import begun
from basecap.study.run import Execution, Runtime, train_run
from basecap.train.distributed import Processes
from basecap.train.interruption import deferred, install


def devices_for(chosen: torch.device, asked: str | None, world: int, per_device: int) -> list[str]:
    """Return where the runs of this process go, a device for each that goes at a time; the GPUs take turns."""
    if per_device > 1 and world > 1:
        raise ConfigError("under torchrun all processes train each run together; leave out --per-device.")
    every = chosen.type == "cuda" and asked is None and world == 1
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if every else [str(chosen)]
    return devices * per_device


def side_by_side(
    execution: Execution, runs: Sequence[RunSpec], devices: Sequence[str], say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Run in one process per device; a process takes the next run when it has finished one. Returns each run's info.

    A process that is killed costs its own run alone, which is recorded and said; another takes its place.
    """
    records = StudyRecords(execution.out)
    held = {index: records.run(run.name, run.seed, run.rate).info() for index, run in enumerate(runs)}
    infos = {index: info for index, info in held.items() if info.get("status") == "finished"}
    waiting = deque(index for index in range(len(runs)) if index not in infos)
    running: dict[Future, tuple[int, _Worker]] = {}
    with contextlib.ExitStack() as pools:
        threads = max(1, torch.get_num_threads() // len(devices))
        shares = [replace(execution, device=device, threads=threads) for device in devices[: len(waiting)]]
        free = [_Worker(share, pools) for share in shares]
        try:
            while waiting or running:
                while waiting and free:
                    index, worker = waiting.popleft(), free.pop()
                    running[worker.take(runs[index])] = index, worker
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    index, worker = running.pop(future)
                    free.append(worker)
                    try:
                        infos[index] = future.result()
                    except BrokenProcessPool:
                        infos[index] = _killed(execution, runs[index], say)
        except Interrupted as interrupted:
            for process in multiprocessing.active_children():  # which write their checkpoints; leaving waits for them
                os.kill(process.pid or 0, interrupted.number)
            raise
    return [infos[index] for index in range(len(runs))]


class _Worker:
    """One process, started when it is needed and again when it was killed: a pool of its own, so that it is known."""

    def __init__(self, execution: Execution, pools: contextlib.ExitStack):
        self.execution = execution
        self.pools = pools
        self.pool: ProcessPoolExecutor | None = None

    def take(self, run: RunSpec) -> Future:
        if self.pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                return self.pool.submit(_work, run)
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, _begin_worker, (self.execution,))
        self.pools.callback(self.pool.shutdown, cancel_futures=True)
        return self.pool.submit(_work, run)


def _killed(execution: Execution, run: RunSpec, say: Callable[[str], None]) -> dict[str, Any]:
    records = StudyRecords(execution.out).run(run.name, run.seed, run.rate)
    info = {**begun(records, run, torch.device(execution.device)), **records.info()}
    if info["status"] == "finished":  # it ended between its last word and the answer
        return info
    info |= {
        "status": "failed",
        "message": "its process was killed, possibly out of memory; free memory and run the same command again, which "
        "resumes from its last checkpoint.",
    }
    info.pop("traceback", None)  # of an earlier failure
    records.write_info(info)
    say(f"{run.label} failed: {info['message']}")
    return info


#: What the jobs of a worker share, from its start on.
_worker: list[Runtime] = []


def _begin_worker(execution: Execution) -> None:
    end_with_parent()
    if execution.device == "cpu" and execution.threads is not None:
        torch.set_num_threads(execution.threads)  # more than there are cores would wait for each other
    install(deferring=True)  # between runs the parent ends this process
    for plugin in execution.plugins:
        load_plugin(plugin)
    _worker[:] = [
        Runtime(
            records=StudyRecords(execution.out),
            device=torch.device(execution.device),
            workloads=material_of(execution.study, execution.out).workloads(),
            evaluations=plan_evaluations(execution.study),
            group=Processes(),
            say=_print,
        )
    ]


def _work(run: RunSpec) -> dict[str, Any]:
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
