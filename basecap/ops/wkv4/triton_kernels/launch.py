"""Launches the Triton kernels of the weighted averages."""

import math

import torch
import triton
from torch import Tensor

from basecap.ops.wkv4.triton_kernels import kernels

#: Channels per program and the fewest tokens per chunk.
CHANNELS, TOKENS = 128, 64


def scan(k_BTD: Tensor, v_BTD: Tensor, decay_D: Tensor, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return running weights and means [B, T, D], float32; see `operators.scan`."""
    weights, values, decay = k_BTD.contiguous(), v_BTD.contiguous(), decay_D.contiguous()
    starts = None if starts_BT is None else starts_BT.to(torch.int32).contiguous()
    out_weights, out_values = torch.empty_like(weights), torch.empty_like(values)
    if weights.numel():
        grid, tokens, sums = _chunks(weights)
        for summary in (True, False):
            kernels.scan_fwd_kernel[grid](
                weights, values, decay, starts, sums, out_weights, out_values, *weights.shape[1:], tokens,
                SUMMARY=summary, STARTS=starts is not None, BD=CHANNELS,
            )  # fmt: skip
    return out_weights, out_values


def accumulate(share_BTD: Tensor, values_2BTD: Tensor) -> Tensor:
    """Return x_t = values_t + share_{t+1} x_{t+1}, [2, B, T, D], float32."""
    shares, values = share_BTD.contiguous(), values_2BTD.contiguous()
    out = torch.empty_like(values)
    if shares.numel():
        grid, tokens, sums = _chunks(shares)
        for summary in (True, False):
            kernels.scan_bwd_kernel[grid](
                shares, values, sums, out, *shares.shape[1:], shares.numel(), tokens, SUMMARY=summary, BD=CHANNELS
            )
    return out


def _chunks(x_BTD: Tensor) -> tuple[tuple[int, int, int], int, Tensor]:
    """Return the grid, the tokens per chunk (about as many as chunks) and room for their summaries."""
    B, T, D = x_BTD.shape
    tokens = max(TOKENS, triton.next_power_of_2(math.isqrt(T)))
    count = triton.cdiv(T, tokens)
    return (triton.cdiv(D, CHANNELS), count, B), tokens, x_BTD.new_empty(B, count, 3, D)
