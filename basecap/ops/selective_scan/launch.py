"""Launches the Triton kernels of the selective scan."""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from basecap.ops.selective_scan import kernels

#: Tokens per chunk, channels per program: a warp's lanes hold neighbouring channels, their registers the tokens, so
#: that the scans need no exchange between lanes.
BT = 16
BD = 32
#: Chunks that are chained at a time.
BM = 16


@dataclass(frozen=True)
class _Inputs:
    """Inputs in the kernels' layouts, and the sizes that every kernel takes."""

    x: Tensor
    dt: Tensor
    A_ND: Tensor
    B_BNT: Tensor
    C_BNT: Tensor
    ids: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T, D, N, M."""
        T, D = self.x.shape[1:]
        return T, D, self.A_ND.shape[0], triton.cdiv(T, BT)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of channels, chunks, rows."""
        return triton.cdiv(self.x.shape[2], BD), self.sizes[3], self.x.shape[0]

    @property
    def options(self) -> dict[str, int]:
        """Compile-time options common to all kernels."""
        return {"PACKED": self.ids is not None, "BT": BT, "BD": BD, "num_warps": BD // 32}


def _inputs(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, segments: Tensor | None) -> _Inputs:
    B_BNT, C_BNT = (part.float().mT.contiguous() for part in (B, C))
    ids = None if segments is None else segments.contiguous()
    A_ND = (A.float() / math.log(2)).T.contiguous()
    return _Inputs(x.contiguous(), dt.contiguous(), A_ND, B_BNT, C_BNT, ids)


def _chain(
    inputs: _Inputs, x: Tensor, W: Tensor, first_BND: Tensor, total: Tensor, back: bool
) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk (after it, of their gradients, with `back`) and beyond the last one."""
    T, D, N, M = inputs.sizes
    added, states = total.new_empty(2, len(x), M, N, D)
    last = torch.empty_like(first_BND)
    kernels.chunk_fwd_kernel[inputs.grid](
        x, inputs.dt, inputs.A_ND, W, inputs.ids, added, total, T, D, N, M, BACK=back, **inputs.options
    )
    kernels.carry_fwd_kernel[(triton.cdiv(D, BD), N, len(x))](
        added, total, inputs.A_ND, inputs.ids, first_BND, states, last, T, D, N, M,
        BACK=back, BM=BM, **inputs.options,
    )  # fmt: skip
    return states, last


def _first(inputs: _Inputs, state_BDN: Tensor | None) -> Tensor:
    if state_BDN is None:
        return inputs.A_ND.new_zeros(len(inputs.x), *inputs.A_ND.shape)
    return state_BDN.float().mT.contiguous()


def _total(inputs: _Inputs) -> Tensor:
    return inputs.A_ND.new_empty(len(inputs.x), inputs.sizes[3], inputs.x.shape[2])


def forward(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    state_BDN: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, D] in the dtype of x and the final state [B, D, N] in float32."""
    inputs = _inputs(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    states, last = _chain(inputs, inputs.x, inputs.B_BNT, _first(inputs, state_BDN), _total(inputs), back=False)
    y = torch.empty_like(inputs.x)
    kernels.output_fwd_kernel[inputs.grid](
        inputs.x,
        inputs.dt,
        inputs.A_ND,
        inputs.B_BNT,
        inputs.C_BNT,
        inputs.ids,
        states,
        y,
        *inputs.sizes,
        **inputs.options,
    )
    return y, last.mT.contiguous()


def backward(
    grads: tuple[Tensor, Tensor],
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    state_BDN: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state; the states between chunks are computed anew."""
    inputs = _inputs(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    dy, total = grads[0].contiguous(), _total(inputs)
    states, _ = _chain(inputs, inputs.x, inputs.B_BNT, _first(inputs, state_BDN), total, back=False)
    later, dstate = _chain(inputs, dy, inputs.C_BNT, grads[1].float().mT.contiguous(), total, back=True)
    dx, ddt = torch.empty_like(inputs.x), torch.empty_like(inputs.dt)
    parts = inputs.A_ND.new_empty(2, inputs.grid[0], *inputs.B_BNT.shape)
    kernels.scan_bwd_kernel[inputs.grid](
        dy, inputs.x, inputs.dt, inputs.A_ND, inputs.B_BNT, inputs.C_BNT, inputs.ids, states, later,
        dx, ddt, parts[0], parts[1], *inputs.sizes, B_BTN.shape[0] * B_BTN.shape[1], **inputs.options,
    )  # fmt: skip
    return (
        dx,
        ddt,
        states.sum((0, 1)).T.to(A_DN.dtype).contiguous(),
        parts[0].sum(0).mT.to(B_BTN.dtype).contiguous(),
        parts[1].sum(0).mT.to(C_BTN.dtype).contiguous(),
        dstate.mT.contiguous(),
    )
