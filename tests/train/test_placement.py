"""What starts before training does."""

import gc
import sys

import pytest
import torch

from basecap.train import placement
from basecap.train.config import TrainSection


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # of PyTorch's own compiler
@pytest.mark.parametrize(
    ("device", "compiled", "starts"),
    [("cuda", None, 1), ("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0), ("cpu", None, 0)],
)
def test_processes_that_compile_kernels_start_once_where_a_gpu_needs_them(device, compiled, starts, monkeypatch):
    from torch._inductor import async_compile

    started = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(gc.isenabled()))
    monkeypatch.setattr(gc, "freeze", lambda: started.append("imported"))
    placement._start_compilers.cache_clear()
    for _ in range(2):
        placement.start_compilers(torch.device(device), TrainSection(compile=compiled))
    assert started == [False, "imported"] * starts and gc.isenabled()
    assert not starts or "torch._inductor.compile_fx" in sys.modules
    placement._start_compilers.cache_clear()
