"""Where and how a run trains."""

import contextlib
import gc
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from basecap.train.config import TrainSection
from basecap.train.distributed import Processes


def resolve(precision: str, device: torch.device) -> Literal["bf16", "fp32"]:
    """Return the precision to use: for "auto" bf16 on a GPU and fp32 on a CPU, otherwise the given one."""
    return "bf16" if precision == "bf16" or (precision == "auto" and device.type == "cuda") else "fp32"


@dataclass(frozen=True, kw_only=True)
class DevicePlacement:
    """Where and how a run trains: device, processes, precision."""

    device: torch.device
    processes: Processes
    bf16: bool

    @classmethod
    def choose(cls, device: torch.device, processes: Processes, precision: str) -> "DevicePlacement":
        """Resolve the precision, see `resolve`."""
        return cls(device=device, processes=processes, bf16=resolve(precision, device) == "bf16")

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the autocast context of the run's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


def compiles_on(device: torch.device, config: TrainSection) -> bool:
    """Return whether models are compiled to train on a device."""
    return device.type == "cuda" if config.compile is None else config.compile


def start_compilers(device: torch.device, config: TrainSection) -> None:
    """Start the processes that compile kernels for a GPU, where models are compiled for it, and import the compiler.

    They need seconds until they are ready. PyTorch would start them at the first compilation, and compile kernels in
    this process, one after the other, until then.
    """
    if device.type == "cuda" and compiles_on(device, config):
        _start_compilers()


@cache
def _start_compilers() -> None:
    """Do it once. Modules stay, so no search for cycles goes through them: 0.7 of 3.1 s, and 0.2 s each time later."""
    collects = gc.isenabled()
    gc.disable()
    try:
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
        import torch._inductor.compile_fx  # noqa: F401, as those processes do meanwhile
    finally:
        if collects:
            gc.enable()
    gc.freeze()
