"""Launches the Triton kernels of the weighted averages."""

import torch
import triton
from torch import Tensor

from basecap.ops.wkv4 import kernels


def scan(k_BTD: Tensor, v_BTD: Tensor, decay_D: Tensor, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return running weights and means [B, T, D], float32; see `operators.scan`."""
    weights, values = k_BTD.contiguous(), v_BTD.contiguous()
    out_weights, out_values = torch.empty_like(weights), torch.empty_like(values)
    if weights.numel():
        grid, tile = _tiles(weights)
        starts = None if starts_BT is None else starts_BT.to(torch.uint8).contiguous()
        kernels.scan_fwd_kernel[grid](
            weights,
            values,
            decay_D.contiguous(),
            starts,
            out_weights,
            out_values,
            *weights.shape[1:],
            STARTS=starts is not None,
            **tile,
        )
    return out_weights, out_values


def accumulate(share_BTD: Tensor, values_2BTD: Tensor) -> Tensor:
    """Return x_t = values_t + share_{t+1} x_{t+1}, [2, B, T, D], float32."""
    shares, values = share_BTD.contiguous(), values_2BTD.contiguous()
    out = torch.empty_like(values)
    if shares.numel():
        grid, tile = _tiles(shares)
        kernels.scan_bwd_kernel[grid](shares, values, out, *shares.shape[1:], shares.numel(), **tile)
    return out


def _tiles(x_BTD: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    B, T, D = x_BTD.shape
    tile = {"BT": min(64, triton.next_power_of_2(T)), "BD": min(16, triton.next_power_of_2(D))}
    return (triton.cdiv(D, tile["BD"]), B), tile
