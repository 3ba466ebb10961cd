"""CUDA graphs: the time of the device without that of Python."""

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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay
