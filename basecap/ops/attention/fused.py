"""Full attention by PyTorch's fused kernels as two calls, for ops that have it in a node of autograd of their own.

PyTorch's SDPA has a node of autograd itself, and so has each transpose around it; a caller in Python waits for all.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from basecap.ops.operators import watched

_aten = torch.ops.aten


class Kernel(NamedTuple):
    """Passes of a kernel, heads before time: `forward` takes q, k, v and the scale and returns o and the rest.

    `backward` takes do, q, k, v, what `forward` returned and the scale, and returns dq, dk and dv.
    """

    forward: Callable[..., Sequence[Any]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Sequence[Any]:
    found: Sequence[Any] = _aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True, scale=scale)
    return found


def _cpu_back(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Sequence[Any], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    back = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    grads: tuple[Tensor, Tensor, Tensor] = back(do, q, k, v, *found, 0.0, True, scale=scale)
    return grads


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Sequence[Any]:
    found: Sequence[Any] = _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True, False, scale=scale)
    return found[:-1]


def _flash_back(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Sequence[Any], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    *sizes, state, unused = found
    back = _aten._scaled_dot_product_flash_attention_backward.default
    grads: tuple[Tensor, Tensor, Tensor] = back(do, q, k, v, *sizes, 0.0, True, state, unused, scale=scale)
    return grads


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Sequence[Any]:
    forward = _aten._scaled_dot_product_cudnn_attention.default
    found: Sequence[Any] = forward(q, k, v, None, True, 0.0, True, False, scale=scale)
    return found[:-1]


def _cudnn_back(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Sequence[Any], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    o, lse, *sizes, seed, offset = found
    back = _aten._scaled_dot_product_cudnn_attention_backward.default
    grads: tuple[Tensor, Tensor, Tensor] = back(do, q, k, v, o, lse, seed, offset, None, *sizes, 0.0, True, scale=scale)
    return grads


#: By the kind of device and the number by which PyTorch calls what SDPA runs.
KERNELS = {
    ("cpu", SDPBackend.FLASH_ATTENTION.value): Kernel(_cpu, _cpu_back),
    ("cuda", SDPBackend.FLASH_ATTENTION.value): Kernel(_flash, _flash_back),
    ("cuda", SDPBackend.CUDNN_ATTENTION.value): Kernel(_cudnn, _cudnn_back),
}


def settings() -> tuple[Any, ...]:
    """Return what `fused_kernel` depends on beside its arguments and deterministic algorithms."""
    if torch.compiler.is_compiling():  # there it returns None
        return ()
    c = torch._C
    allowed = c._get_cudnn_sdp_enabled(), c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled()
    return watched(), *allowed, c._get_math_sdp_enabled(), *c._get_sdp_priority_order()


def fused_kernel(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, scale: float) -> int | None:
    """Return the number of the kernel that SDPA would run on these and that `KERNELS` has, or None.

    None as well where SDPA would do more than run it: pad channels, repeat keys for heads.
    """
    if watched() or q_BTHK.shape != k_BTHK.shape or q_BTHK.shape[3] % 8 or not q_BTHK.numel():
        return None
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    number: int = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=scale)
    return number if (q.device.type, number) in KERNELS else None


def converts(x: Tensor) -> bool:
    """Whether autocast would have SDPA convert x first."""
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype


def forward(number: int, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, scale: float) -> list[Any]:
    """Return what `backward` takes of the pass forward: tensors, numbers and None; the fourth are the outputs."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    return [q, k, v, *KERNELS[q.device.type, number].forward(q, k, v, scale)]


def backward(number: int, do_BTHK: Tensor, found: Sequence[Any], scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and keys [B, T, H, K]; `found` is what `forward` returned."""
    q, k, v, *rest = found
    dq, dk, _ = KERNELS[q.device.type, number].backward(do_BTHK.transpose(1, 2), q, k, v, rest, scale)
    return dq.transpose(1, 2), dk.transpose(1, 2)
