"""What starts before training does."""

import pytest
import torch

from basecap.train.config import TrainSection
from basecap.train.placement import start_compilers


@pytest.mark.parametrize(
    ("device", "compiled", "starts"),
    [("cuda", None, 1), ("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0), ("cpu", None, 0)],
)
def test_processes_that_compile_kernels_start_where_a_gpu_needs_them(device, compiled, starts, monkeypatch):
    from torch._inductor import async_compile

    started = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(device))
    start_compilers(torch.device(device), TrainSection(compile=compiled))
    assert len(started) == starts
