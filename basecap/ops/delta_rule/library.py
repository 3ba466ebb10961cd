"""The delta rule on flash-linear-attention's Triton kernels (the extra `gpu`), where they are installed and right."""

import importlib.util
import logging
import re
from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor

from basecap.errors import ConfigError, nearest
from basecap.ops._dispatch import Backend

logger = logging.getLogger("basecap.ops")

BACKENDS = ("auto", "eager", "triton")


def use_library(backend: Backend, q_BTHK: Tensor, v_BTHV: Tensor, segments: Tensor | None) -> bool:
    """Return whether the library's kernels run on such tensors; what runs is logged once per reason.

    Raises:
        ConfigError: an unknown backend, or "triton" where the kernels cannot run.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}: {nearest(backend, BACKENDS)}")
    if backend == "eager":
        return False
    reason = unsupported(q_BTHK, v_BTHV, segments)
    if backend == "triton" and reason is not None:
        raise ConfigError(f"the delta rule cannot run library kernels: {reason}; use backend='auto' or 'eager'.")
    if not torch.compiler.is_compiling():
        _say(reason)
    return reason is None


def unsupported(q_BTHK: Tensor, v_BTHV: Tensor, segments: Tensor | None) -> str | None:
    """Return why the library's kernels cannot run on such tensors, or None."""
    if not v_BTHV.is_cuda:
        return f"the tensors are on {v_BTHV.device.type}"
    if v_BTHV.dtype not in (torch.bfloat16, torch.float16):
        return f"the library has no kernels for {v_BTHV.dtype}"
    if q_BTHK.shape[3] > 256:
        return f"the library takes heads of at most 256 channels, not {q_BTHK.shape[3]}"
    if segments is not None:
        return "packed rows run in plain PyTorch"
    return _installed(v_BTHV.device)


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V] in float32; see `delta_rule` of this package."""
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, beta = (x.to(v_BTHV.dtype) for x in (q_BTHK, k_BTHK, beta_BTH))
    if log_decay_BTH is None:
        return chunk_delta_rule(
            q, k, v_BTHV, beta, scale=1.0, initial_state=state_BHKV, output_final_state=True
        )  # fmt: skip
    return chunk_gated_delta_rule(
        q, k, v_BTHV, log_decay_BTH.float(), beta, scale=1.0, initial_state=state_BHKV, output_final_state=True
    )


@torch.compiler.assume_constant_result
def _installed(device: torch.device) -> str | None:
    return _refusal(device)  # behind a call of its own: compiled code may not look into caches


@cache
def _refusal(device: torch.device) -> str | None:
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install 'basecap[gpu]')"
    return known_bad(version("fla-core"), version("triton"), torch.cuda.get_device_capability(device))


def known_bad(fla: str, triton: str, capability: tuple[int, int]) -> str | None:
    """Return why these versions are refused on a card of this compute capability, or None.

    On Hopper, Triton 3.4.0 to 3.7.0 compiles the delta rules to silently wrong gradients
    (fla-org/flash-linear-attention, issues 640 and 984).
    """
    if _numbers(fla) < (0, 6, 0):
        return f"fla-core {fla} is older than 0.6.0, the first release whose arguments are known here"
    if capability[0] == 9 and (3, 4, 0) <= _numbers(triton) < (3, 7, 1):
        return f"Triton {triton} computes wrong gradients of the delta rules on Hopper; install triton 3.7.1 or newer"
    return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


@cache
def _say(reason: str | None) -> None:
    if reason is None:
        logger.info("the delta rule runs flash-linear-attention's kernels")
    else:
        logger.info("the delta rule runs in plain PyTorch: %s", reason)
