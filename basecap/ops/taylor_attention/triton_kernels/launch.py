"""Launches the Triton kernels of Taylor attention."""

from typing import Any

import torch
import triton
from torch import Tensor

from basecap.ops._launch import block_of
from basecap.ops._sums import running_sums
from basecap.ops.taylor_attention.triton_kernels import kernels


def forward(q: Tensor, k: Tensor, v: Tensor, eps: float, chunk: int) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] in the dtype of v and denominators [B, T, H] in float32."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o, norm = torch.empty_like(v), torch.empty(v.shape[:3], dtype=torch.float32, device=v.device)
    if v.numel():
        grid, sizes, options = _plan(q, v, chunk)
        past = _sums_before(k, v, None, None, chunk)
        kernels.fwd_kernel[grid](q, k, v, past, o, norm, *sizes, _scale(q), eps, **options)
    return o, norm


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, norm: Tensor, do: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    q, k, v, o, norm, do = (x.contiguous() for x in (q, k, v, o, norm, do))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if v.numel():
        grid, sizes, options = _plan(q, v, chunk)
        factor, delta = torch.empty_like(norm), torch.empty_like(norm)
        past = _sums_before(k, v, None, None, chunk)
        kernels.bwd_q_kernel[grid](q, k, v, o, do, norm, factor, delta, past, dq, *sizes, _scale(q), **options)
        future = _sums_before(q, do, factor, delta, chunk, back=True)
        kernels.bwd_kv_kernel[grid](q, k, v, do, factor, delta, future, dk, dv, *sizes, _scale(q), **options)
    return dq, dk, dv


def _sums_before(
    x: Tensor, y: Tensor, factor: Tensor | None, delta: Tensor | None, chunk: int, back: bool = False
) -> Tensor:
    """Return the sums over all chunks before each, with `back` after each: [B, H, M, K + 1, K + 1, V + 1], float32.

    Those of the first chunk, with `back` of the last, are not read.
    """
    (_, programs), (T, M, root), options = _plan(x, y, chunk)
    B, _, H, K = x.shape
    state = x.new_empty(B, H, M, K + 1, K + 1, y.shape[3] + 1, dtype=torch.float32)
    if M == 1:
        return state
    kernels.sum_kernel[K + 1, M, programs](
        x, y, factor, delta, state, T, M, root, WEIGHTED=factor is not None, **options
    )
    state = state.flip(2) if back else state
    state = torch.cat([state[:, :, :1], running_sums(state[:, :, :-1], 2)], dim=2)
    return state.flip(2).contiguous() if back else state


def _scale(q: Tensor) -> float:
    return q.shape[3] ** -0.5


def _plan(x: Tensor, y: Tensor, chunk: int) -> tuple[tuple[int, int], tuple[int, int, float], dict[str, Any]]:
    """Return the grid over tiles and heads, (T, M, K^(-1/4)), and the compile-time options."""
    B, T, H, K = x.shape
    V = y.shape[3]
    tile = min(64, chunk)
    options = {
        "H": H, "K": K, "V": V, "CHUNK": chunk, "BT": tile,
        "BK": block_of(K + 1), "BV": block_of(V),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    return (triton.cdiv(T, tile), B * H), (T, triton.cdiv(T, chunk), K**-0.25), options
