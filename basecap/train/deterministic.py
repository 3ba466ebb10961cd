"""`train.deterministic`: what makes PyTorch and its libraries give the same bits twice, set for the time of a run."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from basecap.errors import ConfigError
from basecap.system import environment
from basecap.train.config import TrainSection
from basecap.train.placement import compiles_on

#: PyTorch would fill all memory that it allocates, which costs time and changes no number: nothing reads it unwritten.
FILLS = "torch.utils.deterministic.fill_uninitialized_memory"


def settings(train: TrainSection, device: torch.device) -> dict[str, Any]:
    """Return what `deterministic` sets for a run on this device, which run.json records; {} without the option."""
    if not train.deterministic:
        return {}
    found: dict[str, Any] = {"torch.use_deterministic_algorithms": True, FILLS: False}
    if device.type == "cuda":
        found[environment.CUBLAS_VARIABLE] = environment.CUBLAS_BUFFERS
    if compiles_on(device, train):
        found |= {"torch._inductor.config.deterministic": True, "torch._dynamo.config.optimize_ddp": False}
    return found


def prepare(device: torch.device, trains: Iterable[TrainSection]) -> None:
    """Before anything is computed: give cuBLAS fixed buffers if one of these runs is to be deterministic on a GPU."""
    if device.type == "cuda" and any(train.deterministic for train in trains):
        environment.fix_cublas_buffers()


@contextlib.contextmanager
def deterministic(train: TrainSection, device: torch.device) -> Iterator[None]:
    """Set what `settings` says within the block, in place of what the environment says.

    Raises ConfigError where this PyTorch cannot compile code that gives the same bits twice.
    """
    with contextlib.ExitStack() as held:
        if train.deterministic:
            if compiles_on(device, train):
                held.enter_context(_compiled_once())
            prepare(device, [train])
            held.enter_context(_repeating_operations())
        yield


@contextlib.contextmanager
def _repeating_operations() -> Iterator[None]:
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        memory.fill_uninitialized_memory = filled


@contextlib.contextmanager
def _compiled_once() -> Iterator[None]:
    """Let the compiler choose no kernel by its speed, and cut no model, as it does where processes share gradients.

    The first would be another one the next time; the second lets several processes round where one does not.
    """
    from torch._dynamo import config as tracing  # half a second, which a run that compiles nothing need not wait
    from torch._inductor import config

    if not hasattr(config, "deterministic"):
        raise ConfigError(
            f"train.deterministic needs a PyTorch newer than {torch.__version__} to compile models; install one, or "
            "set train.compile=false."
        )
    with config.patch(deterministic=True), tracing.patch(optimize_ddp=False):
        yield
