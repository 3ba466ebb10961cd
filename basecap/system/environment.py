"""The machine: device, versions and how the process was started. Only this module asks for them."""

import ctypes
import hashlib
import os
import platform
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from basecap.errors import ConfigError
from basecap.names import MPS, check_device_name
from basecap.system.processes import usable_cores
from basecap.version import __version__

PACKAGES = ("torch", "triton", "numba", "numpy", "tokenizers", "safetensors", "fla-core", "lm-eval")
#: Folders of the package whose code can change the numbers of a run.
HASHED_FOLDERS = ("data", "evals", "mixers", "models", "ops", "tasks", "train")
#: The variable of the buffers that cuBLAS works in, and such as give the same bits twice: 8 of 4,096 KiB.
CUBLAS_VARIABLE, CUBLAS_BUFFERS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
#: Where Linux has a file for each GPU, and values of CUDA_VISIBLE_DEVICES that hide them all.
DEVICE_FILES, HIDDEN = Path("/dev"), ("", "-1")
#: Options of glibc's mallopt: how much free memory at the end of the heap is returned to the system, and the size from
#: which an allocation is mapped on its own and returned as soon as it is freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def choose_device(name: str | None) -> torch.device:
    """Return the device called `name`, by default this process's GPU or the CPU; raises ConfigError.

    A GPU becomes the current device. On a CPU, the process keeps memory that it frees.
    """
    name = check_device_name(name) or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cpu":
        _keep_freed_memory()
    if device.type == "cuda":
        count = torch.cuda.device_count()
        local = dist.get_node_local_rank(fallback_rank=0)
        device = torch.device("cuda", local if device.index is None else device.index)
        if device.index >= count:
            raise ConfigError(
                f"device {name!r} does not exist: this machine has {count} CUDA GPUs; leave out --device."
            )
        torch.cuda.set_device(device)  # Triton launches on the current device, not on that of the tensors
        # The compiler's advice to round the factors of float32 products, which stay exact on purpose.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32", UserWarning)
    return device


def has_unusable_gpus() -> bool:
    """Whether PyTorch, built for NVIDIA's GPUs, can use none of those that are here and are not hidden."""
    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN or torch.cuda.is_available():
        return False
    return any(DEVICE_FILES.glob("nvidia[0-9]*"))


def choose_checked_device(name: str | None) -> torch.device:
    """Return what `choose_device` does, or the device that only `basecap check` takes; raises ConfigError."""
    if name != MPS:
        return choose_device(name)
    if not torch.backends.mps.is_available():
        raise ConfigError(f"device {MPS!r} does not exist: PyTorch finds no Apple GPU here; leave out --device.")
    return torch.device(MPS)


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory: each training step would otherwise fetch it from the system again, page by page."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the maximum in older releases


def fix_cublas_buffers() -> None:
    """Let cuBLAS work in fixed buffers, with which it gives the same bits twice, whatever the environment says.

    It holds for this process and those that it starts, if this is called before their first product: PyTorch reads the
    variable once, and takes these buffers from nowhere else.
    """
    os.environ[CUBLAS_VARIABLE] = CUBLAS_BUFFERS


def most_threads() -> int:
    """Return the CPU threads that an operation of this process has; PyTorch does not know the quota of a container."""
    return min(torch.get_num_threads(), usable_cores())


def limit_processors(threads: int | None, compilers: int | None) -> None:
    """Limit the threads of operations on the CPU and the processes that compile; None leaves the default.

    Threads of many processes would wait for each other, and each would start as many compilers as there are cores.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if compilers is not None:
        from torch._inductor import config  # half a second, which a process that compiles nothing need not wait

        config.compile_threads = compilers


def refuse_lone_tasks() -> None:
    """Raise ConfigError in one of several tasks of `srun` that `torchrun` did not start: each would do all the work."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and not dist.is_torchelastic_launched():
        raise ConfigError(
            f"srun started this command {tasks} times, and each would run the whole study; use one task, or torchrun."
        )


def describe(device: torch.device) -> dict[str, Any]:
    """Return the versions and hardware that are recorded with every study."""
    on_gpu = device.type == "cuda"
    return {
        "basecap": f"{__version__}+{_code_digest()}",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "threads": torch.get_num_threads(),
    }


@cache
def _code_digest() -> str:
    """Return twelve hex digits of a hash of the code that trains and measures, uncommitted changes included."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(path for folder in HASHED_FOLDERS for path in (package / folder).rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
