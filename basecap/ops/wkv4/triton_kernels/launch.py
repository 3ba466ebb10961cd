"""Launches the Triton kernels of the weighted averages."""

import math

import torch
import triton
from torch import Tensor

from basecap.ops.wkv4.triton_kernels import kernels

#: Channels per program and the fewest tokens per chunk.
CHANNELS, TOKENS = 128, 64
#: Rows and channels of one step of a sum over chunks.
ROWS, COLUMNS = 128, 32


def forward(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    state_B2D: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final state, and the weights and means that the tokens find; see `operators.average`."""
    B, T, D = v_BTD.shape
    k, v, decay, bonus = (x.contiguous() for x in (k_BTD, v_BTD, decay_D, bonus_D))
    first = None if state_B2D is None else state_B2D.float().contiguous()
    ids = None if segments is None else segments.contiguous()
    out, last = torch.empty_like(v), v.new_empty(B, 2, D, dtype=torch.float32)
    found = last.new_empty(2, B, T + 1, D)
    if v.numel():
        tokens, count = _chunks(T)
        sums = last.new_empty(B, count - 1, 3, D)
        for summary, programs in _passes(count):
            kernels.average_fwd_kernel[(triton.cdiv(D, CHANNELS), programs, B)](
                k, v, decay, bonus, first, ids, sums, out, last, *found, T, D, tokens, count,
                SUMMARY=summary, BD=CHANNELS,
            )  # fmt: skip
    return out, last, found


def backward(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    found_2BSD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of k, v, decay, bonus and the first state; see `operators.average_backward`."""
    B, T, D = v_BTD.shape
    k, v, decay, bonus = (x.contiguous() for x in (k_BTD, v_BTD, decay_D, bonus_D))
    do, dlast = (None if x is None else x.contiguous() for x in (grad_o, grad_final))
    dk, dv, ddecay, dbonus = (torch.empty_like(x) for x in (k, v, decay, bonus))
    tokens, count = _chunks(T)
    dfirst = found_2BSD.new_empty(B, 2, D)
    parts = dfirst.new_empty(B * count, 2, D)
    if v.numel():
        sums = dfirst.new_empty(B, count - 1, 3, D, dtype=torch.float64)
        for summary, programs in _passes(count):
            kernels.average_bwd_kernel[(triton.cdiv(D, CHANNELS), programs, B)](
                do, dlast, k, v, decay, bonus, *found_2BSD, sums, dk, dv, dfirst, parts,
                T, D, tokens, count, SUMMARY=summary, BD=CHANNELS,
            )  # fmt: skip
    if D:
        kernels.rates_bwd_kernel[(triton.cdiv(D, COLUMNS),)](parts, ddecay, dbonus, D, len(parts), BR=ROWS, BD=COLUMNS)
    return dk, dv, ddecay, dbonus, dfirst


def _chunks(T: int) -> tuple[int, int]:
    """Return the tokens per chunk and the number of chunks, which is about as large."""
    tokens = max(TOKENS, triton.next_power_of_2(math.isqrt(T)))
    return tokens, triton.cdiv(T, tokens)


def _passes(count: int) -> list[tuple[bool, int]]:
    """Return whether a pass sums chunks up, and its chunks."""
    return [(True, count - 1), (False, count)] if count > 1 else [(False, count)]
