"""The delta rule on flash-linear-attention's Triton kernels (the extra `gpu`), where they are installed and correct.

They take wider heads than the kernels of this package.
"""

import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from basecap.ops._dispatch import constant_result
from basecap.ops._transforms import refuse_transforms
from basecap.ops.delta_rule import triton_kernels
from basecap.ops.known_bad import FLA_DELTA, known_bad_on

RUNS, BACKEND = "flash-linear-attention's kernels", None

#: The library chooses tiles, and so the order of sums, by their speed at the first call.
REPEATS = False


def supports(v_BTHV: Tensor, q_BTHK: Tensor, segments: Tensor | None) -> str | None:
    """Return why these kernels cannot run, or None; heads that `triton_kernels` takes are left to plain PyTorch."""
    reason = unsupported(v_BTHV, segments)
    K = int(q_BTHK.shape[3])
    if reason is None and not triton_kernels.WIDEST < K <= 256:
        return f"they are used for heads of {triton_kernels.WIDEST + 1} to 256 channels, not {K}"
    return reason


def unsupported(v_BTHV: Tensor, segments: Tensor | None) -> str | None:
    """Return why these kernels cannot run with heads of any width, or None."""
    if not v_BTHV.is_cuda:
        return f"the tensors are on {v_BTHV.device.type}"
    if v_BTHV.dtype not in (torch.bfloat16, torch.float16):
        return f"the library has no kernels for {v_BTHV.dtype}"
    if segments is not None:
        return "the library does not take packed rows"
    return _installed(v_BTHV.device)


@constant_result
def _installed(device: torch.device) -> str | None:
    return _refusal(device)  # a separate call: compiled code cannot trace a cached function


@cache
def _refusal(device: torch.device) -> str | None:
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install 'basecap[gpu]')"
    try:
        version("fla-core"), version("triton")
    except PackageNotFoundError as error:
        return f"the release of {error.name} is unknown; install it as a package of that name"
    return known_bad_on(device).get(FLA_DELTA)


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state in float32; `segments` are None."""
    from basecap.ops.delta_rule.fla_kernels import untraced  # it imports PyTorch's compiler, which takes seconds

    refuse_transforms("delta_rule", q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV)
    return untraced.delta_rule(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV)
