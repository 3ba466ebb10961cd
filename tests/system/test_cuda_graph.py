"""A capture that fails leaves PyTorch as it was, and says what failed."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from basecap.system.cuda_graph import GraphPool


@pytest.mark.parametrize("ended", [False, True])
def test_a_failed_capture_restores_stream_random_numbers_and_memory(ended: bool, monkeypatch: pytest.MonkeyPatch):
    done = []

    @contextlib.contextmanager
    def graph(held, pool, stream):
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    def end(device, pool):
        if ended:
            raise RuntimeError("not recording")
        done.append(("end", device, pool))

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    generator = SimpleNamespace(clone_state=lambda: "random numbers", graphsafe_set_state=done.append)
    monkeypatch.setattr(torch.cuda, "default_generators", {3: generator})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: done.append(stream))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: done.append(("release", device, pool)))

    def fail() -> None:
        raise RuntimeError("reads a number")

    with pytest.raises(RuntimeError, match="reads a number"):
        GraphPool().capture(fail)
    with pytest.raises(RuntimeError, match="the capture was invalidated"):
        GraphPool().capture(lambda: None)
    freed = [] if ended else [("end", 3, (0, 7)), ("release", 3, (0, 7))]
    assert done == 2 * ["stream", "random numbers", *freed]
