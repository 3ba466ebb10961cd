"""Which implementation of an op runs: Triton kernels on a GPU that supports them, plain PyTorch elsewhere.

On a CPU an op may have kernels that Numba compiles, where it is installed.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from basecap.errors import ConfigError, nearest

Implementation = Literal["eager", "triton", "numba"]
Backend = Literal["auto", Implementation]
Decided = TypeVar("Decided", bound=Callable[..., Any])

logger = logging.getLogger("basecap.ops")

#: What each op runs on, and why where that is plain PyTorch; the ops used since this was last emptied.
IMPLEMENTATIONS: dict[str, str] = {}


def constant_result(function: Decided) -> Decided:
    """Return `function`, marked as `torch.compiler.assume_constant_result` does: compiled code calls it once, for good.

    PyTorch's own decorator imports its compiler, which takes seconds also where nothing is compiled.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def note(op: str, implementation: str, reason: str | None) -> None:
    """Remember what `op` runs on, with the `reason` that keeps it from kernels, and log it once."""
    IMPLEMENTATIONS[op] = implementation if reason is None else f"{implementation}: {reason}"
    _log_once(op, IMPLEMENTATIONS[op])


@cache
def _log_once(op: str, what: str) -> None:
    logger.info("%s runs %s", op, what)


def interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter, on the CPU (TRITON_INTERPRET=1)."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def unsupported_by_triton(x: Tensor, *, widest: int | None = None, shared: int = 0) -> str | None:
    """Return why Triton kernels cannot run on this tensor, or None; the arguments are those of `choose`."""
    if widest is not None and x.shape[-1] > widest:
        return f"the kernels take heads of at most {widest} channels, not {x.shape[-1]}"
    return _unsupported(x.device, x.dtype, shared)


@constant_result
def _unsupported(device: torch.device, dtype: torch.dtype, shared: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"there are no kernels for {dtype}"
    if interpreted():
        # The interpreter computes bfloat16 products wrongly without saying so.
        return None if dtype == torch.float32 else "Triton's interpreter is only right in float32"
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if device.index != torch.cuda.current_device():
        return f"{device} is not the current device; call torch.cuda.set_device({device.index})"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need compute capability 8.0 or newer"
    if torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor < shared:
        return f"the kernels need {shared // 1024} KB of shared memory"
    return None


@constant_result
def _unsupported_by_numba(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why kernels for the CPU cannot run on such tensors, or None."""
    if device.type != "cpu":
        return f"the tensors are on {device.type}"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"there are no kernels for {dtype}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'basecap[cpu]')"
    return _import_error("numba")


@cache
def _import_error(package: str) -> str | None:
    """Return why an installed package cannot be imported, or None: Numba refuses a NumPy newer than itself."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return f"{package} cannot be imported: {error}"
    return None


def check_backend(backend: Backend, *, numba: bool = False) -> None:
    """Raise ConfigError unless this is one of the names of Backend; `numba`: whether the op has kernels for the CPU."""
    names = ("auto", "eager", "triton", "numba") if numba else ("auto", "eager", "triton")
    if backend not in names:
        raise ConfigError(f"unknown backend {backend!r}: {nearest(backend, names)}")


def choose(
    op: str, backend: Backend, x: Tensor, *, widest: int | None = None, shared: int = 0, numba: bool = False
) -> Implementation:
    """Return what `op` runs on tensors like `x`; it is logged once per op and reason.

    Args:
        op: name of the op, for the log.
        backend: "auto" takes kernels wherever they run; the others insist.
        x: one of the op's tensors.
        widest: the most channels the last dimension of `x` may have for the Triton kernels; None: any.
        shared: bytes of shared memory a block of the Triton kernels takes.
        numba: whether the op has kernels for the CPU.

    Raises:
        ConfigError: an unknown backend, or one insisted on where it cannot run.
    """
    check_backend(backend, numba=numba)
    if backend == "eager":
        return "eager"
    on_cpu = _unsupported_by_numba(x.device, x.dtype) if numba else None
    reason = on_cpu if backend == "numba" else unsupported_by_triton(x, widest=widest, shared=shared)
    if backend != "auto":
        if reason is not None:
            raise ConfigError(
                f"{op} cannot run its {backend.title()} kernels: {reason}; use backend='auto' or 'eager'."
            )
        return backend
    if reason is None and not x.is_cuda:
        reason = f"the tensors are on {x.device.type}"
    found: Implementation = "triton" if reason is None else "eager"
    if numba and reason is not None:
        found, reason = ("numba", None) if on_cpu is None else ("eager", on_cpu if x.is_cpu else reason)
    # float64 is what results are compared with: nobody waits for kernels there.
    if x.dtype != torch.float64 and not torch.compiler.is_compiling():
        note(op, "in plain PyTorch" if found == "eager" else f"its {found.title()} kernels", reason)
    return found


def use_triton(op: str, backend: Backend, x: Tensor, *, widest: int | None = None, shared: int = 0) -> bool:
    """Return whether `op`, which has no other kernels, runs those of Triton; see `choose`."""
    return choose(op, backend, x, widest=widest, shared=shared) == "triton"
