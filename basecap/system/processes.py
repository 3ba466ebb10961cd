"""A pool of processes that do jobs side by side."""

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

#: Raised by the future of a job whose worker was killed.
WorkerKilled = BrokenProcessPool

#: How workers start: in an interpreter of their own, as a fork of this process could use neither its GPU nor its locks.
START_METHOD = "spawn"


def usable_cores() -> int:
    """Return the number of cores that this process may use, which may be fewer than the machine has; at least 1.

    The scheduler of a cluster, `taskset` or a container may restrict the cores, or the share of their time.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # there is no cgroup (version 2), or its quota is "max"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


class WorkerPool(Generic[S]):
    """Processes that do jobs side by side and live until the context is left.

    A worker starts with its first job, and again after it was killed, which fails at most the job that it was doing.
    A context that is left because of a signal passes SIGTERM on to the workers and waits for them to end.
    """

    def __init__(self, begin: Callable[[S], None], starts: Sequence[S]):
        """Take a function that each worker calls once before its first job, and its argument for each worker.

        An error of `begin` is raised by the future of the worker's first job. Workers ignore SIGINT until they have
        called it, so that a worker prints no traceback while it imports.
        """
        #: The workers that do jobs at a time: any number of the `starts`, the first ones as long as they do.
        self.most = len(starts)
        self._pools = contextlib.ExitStack()
        self._free = deque(_Worker(pickle.dumps((begin, start)), self._pools) for start in starts)

    def __enter__(self) -> "WorkerPool[S]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):  # also `Interrupted`
            for process in multiprocessing.active_children():
                process.terminate()
        self._pools.close()

    def run(
        self,
        job: Callable[[T], R],
        items: Sequence[T],
        crowded: Callable[[T, "Future[R]"], bool] = lambda item, future: False,
    ) -> Iterator[tuple[T, "Future[R]"]]:
        """Yield each item with the finished future of `job(item)`, in the order in which jobs end.

        Args:
            job: a function at the top level of a module.
            items: sent to the workers; a free worker takes the next one.
            crowded: whether a job that ran beside others failed as they left it too little. It is done again after the
                waiting items, when one of the others has ended; if that is crowded, too, it is done a last time, alone.
        """
        for number, future in self._run(job, items, tries=1, crowded=lambda n, future: crowded(items[n], future)):
            yield items[number], future

    def run_in_order(self, job: Callable[[T], R], items: Sequence[T]) -> Iterator["Future[R]"]:
        """Yield the finished future of `job(item)` for each item, in the order of the items.

        A job whose worker is killed is tried a second time.
        """
        finished: dict[int, Future[R]] = {}
        following = 0
        for number, future in self._run(job, items, tries=2, crowded=lambda number, future: False):
            finished[number] = future
            while following in finished:
                yield finished.pop(following)
                following += 1

    def _run(
        self,
        job: Callable[[T], R],
        items: Sequence[T],
        tries: int,
        crowded: Callable[[int, "Future[R]"], bool],
    ) -> Iterator[tuple[int, "Future[R]"]]:
        waiting, left = deque(range(len(items))), [tries] * len(items)
        beside = [self.most - 1] * len(items)  # how many other jobs may run when an item starts
        running: dict[Future[R], tuple[int, _Worker]] = {}
        met: set[int] = set()  # items whose job ran beside others
        while waiting or running:
            while self._free and len(running) < self.most:
                number = next((n for n in waiting if len(running) <= beside[n]), None)
                if number is None:
                    break
                waiting.remove(number)
                worker = self._free.popleft()
                running[worker.take(job, items[number])] = number, worker
                if len(running) > 1:
                    met.update(n for n, _ in running.values())
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, worker = running.pop(future)
                self._free.appendleft(worker)  # before those that have not started
                killed = isinstance(future.exception(), WorkerKilled)
                if killed:
                    worker.await_end()
                if killed and left[number] > 1:
                    left[number] -= 1
                    waiting.appendleft(number)
                elif number in met and crowded(number, future):
                    beside[number] = max(0, len(running) - 1) if beside[number] == self.most - 1 else 0
                    met.discard(number)
                    waiting.append(number)
                else:
                    yield number, future


class _Worker:
    """One process: a pool of its own, because a larger pool does not report which process was killed."""

    def __init__(self, start: bytes, pools: contextlib.ExitStack):
        self.start = start
        self.pools = pools
        self.pool: ProcessPoolExecutor | None = None

    def take(self, job: Callable[[T], R], item: T) -> "Future[R]":
        if self.pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                return self.pool.submit(_do, job, item)
        context = multiprocessing.get_context(START_METHOD)
        self.pool = ProcessPoolExecutor(1, context, _prepare_worker, (self.start,))
        self.pools.callback(self.pool.shutdown, cancel_futures=True)
        return self.pool.submit(_do, job, item)

    def await_end(self) -> None:
        """Wait until a killed process is gone: a pool reports that while the system still frees the process's locks."""
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None


#: In a worker, what it calls before its first job; empty afterwards.
_pending: list[tuple[bytes, Any]] = []


def _prepare_worker(start: bytes) -> None:
    """Imports nothing of its own: a signal ends this process without a word until its first job."""
    _pending.append((start, signal.signal(signal.SIGINT, signal.SIG_IGN)))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _do(job: Callable[[T], R], item: T) -> R:
    if _pending:
        content, handler = _pending[0]
        begin, start = pickle.loads(content)
        signal.signal(signal.SIGINT, handler)
        begin(start)
        _pending.clear()
    return job(item)


def _end_with_parent() -> None:
    """End this process when its parent is killed, which the worker of a pool alone would wait for forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
