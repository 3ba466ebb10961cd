"""Launches the Triton kernels of the recurrences."""

import torch
import triton
from torch import Tensor

from basecap.ops._recurrence import kernels

#: Value channels per program, warps per program and tokens loaded ahead.
VALUES, WARPS, STAGES = 16, 1, 4
#: Tokens, whole chunks, per launch of the backward kernel, whose programs write their parts of gradients in float32.
SPAN = 256

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


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


def recur_backward(
    grads: tuple[Tensor, Tensor], inputs: Inputs, kept: Tensor, starts: Tensor | None, chunk: int
) -> tuple[Tensor, ...]:
    """Return the gradients of r, log_decay, k, v, a, b and the state, those of a and b empty where there are none."""
    r, log_decay, k, v, a, b = _contiguous(inputs)
    (B, T, H, K), V = r.shape, v.shape[3]
    grid, tile = _tiles(r, v, a, chunk)
    wide, span = kept.new_empty, min(SPAN, T)
    # One memory for the parts of all spans: a record of this call would keep several.
    summed = (r, log_decay, k) if a is None or b is None else (r, log_decay, k, a, b)
    parts, total = wide(len(summed), grid[0], B, span, H, K), wide(B, span, H, K)
    found = [torch.empty_like(x) for x in summed]
    dr, dw, dk, da, db = (*parts, None, None)[:5]
    dv, dstate = torch.empty_like(v), wide(B, H, K, V)
    scratch = wide(grid[0] * grid[1], chunk, tile["BK"], tile["BV"])
    do, later = (x.contiguous() for x in grads)
    flags = _flags(starts)
    for begin in reversed(range(0, T, span)) if B else ():
        end = min(T, begin + span)
        kernels.recur_bwd_kernel[grid](
            r, log_decay, k, v, a, b, flags, kept, do, later, scratch, dr, dw, dk, dv, da, db, dstate,
            begin, end, T, span, H, K, V, total.numel(), STARTS=starts is not None, **tile,
        )  # fmt: skip
        later = dstate
        for part, x in zip(parts, found, strict=True):
            torch.sum(part, 0, out=total)
            x[:, begin:end].copy_(total[:, : end - begin])
    found = [*found[:3], dv, *(found[3:] or (wide(0), wide(0)))]
    return *found, dstate


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
