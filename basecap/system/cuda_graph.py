"""The time of a GPU: of what Python launches, and by CUDA graphs without Python."""

import contextlib
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import torch

Result = TypeVar("Result")

#: Runs before the capture: they compile, tune and allocate.
WARM_UP = 3
#: Share of the free memory that what is captured may take: a graph keeps it, and other work needs its own beside it.
ROOM = 0.5
#: Graphs whose capture failed: PyTorch's allocator of host memory still asks them whether they capture.
_FAILED: list[torch.cuda.CUDAGraph] = []


def captured(run: Callable[[], object], times: int = 1) -> Callable[[], None]:
    """Return the replay of `times` calls of `run` as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)

    def calls() -> None:
        for _ in range(times):
            run()

    return capture(calls)


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of `run` as a CUDA graph on the current GPU, see `GraphPool.capture`."""
    return GraphPool().capture(run)


class GraphPool:
    """CUDA graphs of the current GPU in one piece of memory: they have to run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # that of torch.cuda.graph is of the first GPU that captured

    def rehearse(self, run: Callable[[], Result]) -> tuple[Result, int]:
        """Run what will be captured; return its result and the bytes that it took at most.

        Raises RuntimeError where it waits for the GPU, which no graph can.
        """
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        with _without_waiting():
            result = run()
        return result, torch.cuda.max_memory_allocated() - held

    def room(self) -> int:
        """Return the bytes that this process can still take of the GPU's memory."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        """Return the replay of one call of `run`, which computes nothing now.

        It has run before, so that nothing is compiled, tuned or loaded in it. Raises RuntimeError where it cannot be
        captured; the GPU can be used as before then.
        """
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        errors: list[Exception] = []
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                try:
                    run()
                except Exception as error:
                    errors.append(error)
                    raise
        except BaseException:
            torch.cuda.set_stream(stream)
            self._leave(graph)
            if errors:  # ending the capture fails too, and does not say why
                raise errors.pop() from None
            raise
        return graph.replay

    def _leave(self, graph: torch.cuda.CUDAGraph) -> None:
        """Take memory and random numbers from a capture that failed, which PyTorch does not do."""
        device = torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())  # as it is, but not that of a capture
        with contextlib.suppress(RuntimeError):  # the capture ended, and its graph returns the memory
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
            _FAILED.append(graph)


@contextlib.contextmanager
def _without_waiting() -> Iterator[None]:
    """Let operations that wait for the GPU raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    _set_waiting("error")
    try:
        yield
    finally:
        _set_waiting(before)


def _set_waiting(mode: int | Literal["error"]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls this mode a prototype that misses some operations
        torch.cuda.set_sync_debug_mode(mode)


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median time of `run` on the current GPU over `repeats` calls, after two warm-up calls."""
    times = []
    for at in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if at >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)
