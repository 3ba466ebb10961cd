"""The time of a GPU: of what Python launches, and by CUDA graphs without Python."""

import statistics
from collections.abc import Callable

import torch

#: Runs before the capture: they compile, tune and allocate.
WARM_UP = 3


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
    """Return the replay of `run` as a CUDA graph on the current GPU; its kernels are not run before the first replay.

    Raises RuntimeError where it cannot be one, as when it reads a number back from the GPU.
    """
    graph = torch.cuda.CUDAGraph()
    # The default stream of torch.cuda.graph is that of the first device that captured.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        run()
    return graph.replay


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
