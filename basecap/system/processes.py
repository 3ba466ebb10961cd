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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

#: What jobs share that may be too little for all of them: the place of a worker, such as its GPU, or the machine.
Shared = Literal["place", "machine"]
#: Of a job that has ended and what it shared with others: which of that was too little for it, None for nothing.
Crowded = Callable[[T, Future[R], Collection[Shared]], Shared | None]


class Kin(NamedTuple):
    """What makes items alike. A worker does best one of the `kind` that it did last; a `turn` comes after another."""

    turn: object = None
    kind: object = None


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

    def __init__(self, begin: Callable[[S], None], starts: Sequence[S], places: Sequence[str] = ()):
        """Take a function that each worker calls once before its first job, its argument and place for each worker.

        Without places all workers are at one. An error of `begin` is raised by the future of the worker's first job.
        Workers ignore SIGINT until they have called it, so that a worker prints no traceback while it imports.
        """
        #: The workers that do jobs at a time: any number of the `starts`, as many at each place, the first ones as long
        #: as they do.
        self.most = len(starts)
        self._pools = contextlib.ExitStack()
        self._places = len({*places}) or 1
        self._free = deque(
            _Worker(pickle.dumps((begin, start)), place, self._pools)
            for start, place in zip(starts, places or [""] * len(starts), strict=True)
        )

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
        crowded: Crowded[T, R] = lambda item, future, shared: None,
        kin: Callable[[T], Kin] = lambda item: Kin(),
    ) -> Iterator[tuple[T, "Future[R]"]]:
        """Yield each item with the finished future of `job(item)`, in the order in which jobs end.

        Args:
            job: a function at the top level of a module.
            items: sent to the workers; a free worker takes the next one, or another of the same turn: of the kind that
                it did last, else of one that none of the others did last.
            crowded: what a job that ran beside others found too little, as they left it. It is done again after the
                waiting items, beside fewer others at its place or on the machine; if that is crowded, too, it is done a
                last time, alone there.
            kin: of an item.
        """
        kins = [kin(item) for item in items]
        for number, future in self._run(job, items, kins, 1, lambda n, *found: crowded(items[n], *found)):
            yield items[number], future

    def run_in_order(self, job: Callable[[T], R], items: Sequence[T]) -> Iterator["Future[R]"]:
        """Yield the finished future of `job(item)` for each item, in the order of the items.

        A job whose worker is killed is tried a second time.
        """
        finished: dict[int, Future[R]] = {}
        following = 0
        kins = [Kin()] * len(items)
        for number, future in self._run(job, items, kins, 2, lambda number, future, shared: None):
            finished[number] = future
            while following in finished:
                yield finished.pop(following)
                following += 1

    def _run(
        self,
        job: Callable[[T], R],
        items: Sequence[T],
        kins: Sequence[Kin],
        tries: int,
        crowded: Crowded[int, R],
    ) -> Iterator[tuple[int, "Future[R]"]]:
        waiting, left = deque(range(len(items))), [tries] * len(items)
        bears: list[dict[Shared, int]] = [{} for _ in items]  # how many other jobs a crowded one runs beside, if it did
        met: list[set[Shared]] = [set() for _ in items]  # what its job shared with others
        running: dict[Future[R], tuple[int, _Worker]] = {}
        while waiting or running:
            while len(running) < self.most and (found := self._next(waiting, [*running.values()], bears, kins)):
                number, worker = found
                worker.kind = kins[number].kind or worker.kind
                waiting.remove(number)
                self._free.remove(worker)
                running[worker.take(job, items[number])] = number, worker
                for shared, together in _sharing(worker, running.values()).items():
                    for other in together if len(together) > 1 else ():
                        met[other].add(shared)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, worker = running.pop(future)
                self._free.appendleft(worker)  # before those that have not started
                killed = isinstance(future.exception(), WorkerKilled)
                if killed:
                    worker.await_end()
                if killed and left[number] > 1:
                    left[number] -= 1
                    waiting.appendleft(number)
                elif met[number] and (lacks := crowded(number, future, met[number])):
                    others = len(_sharing(worker, running.values())[lacks])
                    bears[number][lacks] = 0 if lacks in bears[number] else max(0, others - 1)
                    met[number].clear()
                    waiting.append(number)
                else:
                    yield number, future

    def _next(
        self,
        waiting: Collection[int],
        running: Sequence["_Running"],
        bears: Sequence[Mapping[Shared, int]],
        kins: Sequence[Kin],
    ) -> "_Running | None":
        """Return the next item that may start and the worker that takes it; None while there is none.

        Neither it nor a job beside it may then have more others than it bears.
        """
        for worker in self._free:
            sharing = _sharing(worker, running)
            if len(sharing["place"]) * self._places >= self.most:
                continue
            fitting = (
                number
                for number in waiting
                if all(
                    len(others) <= bears[one].get(shared, len(others))
                    for shared, others in sharing.items()
                    for one in (number, *others)
                )
            )
            taken = {other.kind for other in (*self._free, *(one for _, one in running)) if other is not worker}
            found = _preferred(((number, kins[number]) for number in fitting), worker.kind, taken)
            if found is not None:
                return found, worker
        return None


def _preferred(items: Iterable[tuple[int, Kin]], last: object, taken: Collection[object]) -> int | None:
    """Return the first item of the kind `last`, else of a kind that is not `taken`, else the first; all of one turn."""
    first: tuple[int, Kin] | None = None
    untaken: int | None = None
    for number, kin in items:
        first = first or (number, kin)
        if kin.turn != first[1].turn:
            break
        if kin.kind == last:
            return number
        if untaken is None and kin.kind not in taken:
            untaken = number
    return untaken if first is None or untaken is not None else first[0]


def _sharing(worker: "_Worker", running: Collection["_Running"]) -> dict[Shared, list[int]]:
    """Return the items of the running jobs at the place of a worker, and of all."""
    return {
        "place": [number for number, other in running if other.place == worker.place],
        "machine": [number for number, _ in running],
    }


class _Worker:
    """One process: a pool of its own, because a larger pool does not report which process was killed."""

    def __init__(self, start: bytes, place: str, pools: contextlib.ExitStack):
        self.start = start
        self.place = place
        self.pools = pools
        self.pool: ProcessPoolExecutor | None = None
        #: Of its last item that has one.
        self.kind: object = None

    def take(self, job: Callable[[T], R], item: T) -> "Future[R]":
        if self.pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                return self.pool.submit(_do, job, item)
        context = multiprocessing.get_context(START_METHOD)
        self.pool = ProcessPoolExecutor(1, context, _prepare_worker, (self.start,))
        self.pools.callback(self.pool.shutdown, cancel_futures=True)
        with _sigint_blocked():
            return self.pool.submit(_do, job, item)

    def await_end(self) -> None:
        """Wait until a killed process is gone: a pool reports that while the system still frees the process's locks."""
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = self.kind = None


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in processes that this thread starts, as they import the main module; here it comes afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: An item and the worker that does its job.
_Running = tuple[int, _Worker]

#: In a worker, what it calls before its first job; empty afterwards.
_pending: list[tuple[bytes, Any]] = []


def _prepare_worker(start: bytes) -> None:
    """Imports nothing of its own: a signal ends this process without a word until its first job."""
    _pending.append((start, signal.signal(signal.SIGINT, signal.SIG_IGN)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
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
