"""Which kernels of flash-linear-attention (the extra `gpu`) can run: installed, of a known version and correct."""

import importlib.util
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch import Tensor

from basecap.ops._dispatch import constant_result


class Fault(NamedTuple):
    """Kernels that Triton compiles to wrong code: versions `since` <= v < `fixed`, on one kind of GPU."""

    op: str
    major: int  # of the card's compute capability
    since: tuple[int, int, int]
    fixed: tuple[int, int, int]
    symptom: str


#: Sources: issues 640 and 984 of fla-org/flash-linear-attention.
FAULTS = (Fault("the delta rule", 9, (3, 4, 0), (3, 7, 1), "computes wrong gradients of the delta rules on Hopper"),)


def unsupported(op: str, v_BTHV: Tensor, segments: Tensor | None) -> str | None:
    """Return why no kernels of the library run for `op` on such tensors, or None."""
    if not v_BTHV.is_cuda:
        return f"the tensors are on {v_BTHV.device.type}"
    if v_BTHV.dtype not in (torch.bfloat16, torch.float16):
        return f"the library has no kernels for {v_BTHV.dtype}"
    if segments is not None:
        return "the library does not take packed rows"
    return _installed(op, v_BTHV.device)


@constant_result
def _installed(op: str, device: torch.device) -> str | None:
    return _refusal(op, device)  # a separate call: compiled code cannot trace a cached function


@cache
def _refusal(op: str, device: torch.device) -> str | None:
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install 'basecap[gpu]')"
    try:
        releases = version("fla-core"), version("triton")
    except PackageNotFoundError as error:
        return f"the release of {error.name} is unknown; install it as a package of that name"
    return known_bad(op, *releases, torch.cuda.get_device_capability(device))


def known_bad(op: str, fla: str, triton: str, capability: tuple[int, int]) -> str | None:
    """Return why `op` refuses these versions on a card of this compute capability, or None."""
    if _numbers(fla) < (0, 6, 0):
        return f"fla-core {fla} is older than 0.6.0, the first release whose arguments are known here"
    for fault in FAULTS:
        if (fault.op, fault.major) == (op, capability[0]) and fault.since <= _numbers(triton) < fault.fixed:
            fixed = ".".join(map(str, fault.fixed))
            return f"Triton {triton} {fault.symptom}; install triton {fixed} or newer"
    return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])
