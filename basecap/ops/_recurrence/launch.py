"""Launches the Triton kernels of the recurrences."""

import torch
import triton
from torch import Tensor

from basecap.ops._recurrence import kernels
from basecap.ops._replay import replayed

#: Value channels per program, warps per program and tokens loaded ahead.
VALUES, WARPS, STAGES = 16, 1, 4

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@replayed
def recur(inputs: Inputs, state: Tensor, starts: Tensor | None, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, the final state and those kept every `chunk` tokens; `inputs` are r, log_decay, k, v, a, b."""
    r, log_decay, k, v, a, b = _contiguous(inputs)
    B, T, H, K = r.shape
    V = v.shape[3]
    o = state.new_empty(v.shape)
    final = state.new_empty(B, H, K, V)
    kept = state.new_empty(B * H, triton.cdiv(T, chunk), K, V)
    grid, tile = _tiles(r, v, a, chunk)
    if B:
        kernels.recur_fwd_kernel[grid](
            r, log_decay, k, v, a, b, state.contiguous(), _flags(starts), o, final, kept, T, H, K, V,
            STARTS=starts is not None, **tile,
        )  # fmt: skip
    return o, final, kept


@replayed
def recur_backward(
    grads: tuple[Tensor, Tensor], inputs: Inputs, kept: Tensor, starts: Tensor | None, chunk: int
) -> tuple[Tensor, ...]:
    """Return the gradients of r, log_decay, k, v, a, b and the state, those of a and b empty where there are none."""
    r, log_decay, k, v, a, b = _contiguous(inputs)
    B, T, H, K = r.shape
    V = v.shape[3]
    grid, tile = _tiles(r, v, a, chunk)
    wide = kept.new_empty
    dr, dw, dk = (wide(grid[0], B, T, H, K) for _ in range(3))
    da, db = (wide(grid[0], B, T, H, K) if part is not None else wide(grid[0], 0) for part in (a, b))
    dv, dstate = wide(B, T, H, V), wide(B, H, K, V)
    scratch = wide(grid[0] * grid[1], chunk, tile["BK"], tile["BV"])
    do, dfinal = (x.contiguous() for x in grads)
    if B:
        kernels.recur_bwd_kernel[grid](
            r, log_decay, k, v, a, b, _flags(starts), kept, do, dfinal, scratch,
            dr, dw, dk, dv, da, db, dstate, T, H, K, V, r.numel(),
            STARTS=starts is not None, **tile,
        )  # fmt: skip
    summed = [x.sum(0) for x in (dr, dw, dk, da, db)]
    summed.insert(3, dv)
    like = (r, log_decay, k, v, r if a is None else a, r if b is None else b)
    return *(x.to(y.dtype) for x, y in zip(summed, like, strict=True)), dstate


def _contiguous(inputs: Inputs) -> Inputs:
    r, log_decay, k, v, *delta = inputs
    a, b = (None if x is None else x.contiguous() for x in delta)
    return r.contiguous(), log_decay.contiguous(), k.contiguous(), v.contiguous(), a, b


def _flags(starts: Tensor | None) -> Tensor | None:
    return None if starts is None else starts.to(torch.int32).contiguous()


def _tiles(r: Tensor, v: Tensor, a: Tensor | None, chunk: int) -> tuple[tuple[int, int], dict[str, int]]:
    BV = min(VALUES, triton.next_power_of_2(v.shape[3]))
    BK = triton.next_power_of_2(r.shape[3])
    tile = {"DELTA": a is not None, "CHUNK": chunk, "BK": BK, "BV": BV, "STAGES": STAGES, "num_warps": WARPS}
    return (triton.cdiv(v.shape[3], BV), r.shape[0] * r.shape[2]), tile
