"""Launches the Triton kernels of the selective scan."""

import math
from dataclasses import dataclass
from functools import reduce

import torch
import triton
from torch import Tensor

from basecap.ops.selective_scan import kernels
from basecap.ops.selective_scan.sizes import BT, kept_shape

#: Channels per program.
BD = 32
#: The most states that a walk keeps in registers: groups of them walk side by side, which keeps a GPU busy.
STATES = 8
#: Tokens that one program walks; longer sequences are cut into spans, which costs one more walk. A multiple of BT.
SPAN = 2048
#: Spans that are chained at a time.
BS = 16
#: One warp a program, 12 on a multiprocessor by its 65,536 registers.
OPTIONS = {"BD": BD, "num_warps": 1, "maxnreg": 168}


@dataclass(frozen=True)
class _Inputs:
    """Inputs in the kernels' layouts: A in units of log2, B and C padded with zeros to whole chunks."""

    x: Tensor
    dt: Tensor
    A_ND: Tensor
    B_BNT: Tensor
    C_BNT: Tensor
    ids: Tensor | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, T, D, N."""
        return *self.x.shape, self.A_ND.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks of channels."""
        return triton.cdiv(self.x.shape[2], BD)

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return triton.cdiv(self.x.shape[1], BT)


def _inputs(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, segments: Tensor | None) -> _Inputs:
    T = x.shape[1]
    B_BNT, C_BNT = A.new_zeros(2, len(x), A.shape[1], triton.cdiv(T, BT) * BT, dtype=torch.float32)
    B_BNT[..., :T].copy_(B.mT)
    C_BNT[..., :T].copy_(C.mT)
    ids = None if segments is None else segments.contiguous()
    A_ND = (A.float() / math.log(2)).T.contiguous()
    return _Inputs(x.contiguous(), dt.contiguous(), A_ND, B_BNT, C_BNT, ids)


def _states_at_once(N: int) -> int:
    """Return the largest divisor of N up to STATES."""
    return next(n for n in range(STATES, 0, -1) if N % n == 0)


def _walk(
    inputs: _Inputs, first_BND: Tensor, *, back: bool = False, dy: Tensor | None = None, y: Tensor | None = None,
    states: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run the recurrence, with `back` that of the gradients, into `y` and `states`; return the last state."""
    B, T, D, N = inputs.shape
    spans = triton.cdiv(T, SPAN)
    BN = _states_at_once(N)
    x, W = (dy, inputs.C_BNT) if back else (inputs.x, inputs.B_BNT)

    def walk(first: Tensor, y: Tensor | None, states: Tensor | None, total: Tensor | None) -> Tensor:
        last = torch.empty_like(first)
        kernels.walk_fwd_kernel[(inputs.blocks * (N // BN), spans, B)](
            x, inputs.dt, inputs.A_ND, W, inputs.C_BNT, inputs.ids, first, y, states, last, total,
            T, D, N, inputs.chunks, SPAN,
            BACK=back, BT=BT, BN=BN, ROWS=triton.next_power_of_2(BN), **OPTIONS,
        )  # fmt: skip
        return last

    first = first_BND[:, None]
    if spans > 1:
        total = first.new_empty(B, spans, D)
        added = walk(first.new_zeros(B, spans, N, D), None, None, total)
        first = torch.empty_like(added)
        kernels.carry_fwd_kernel[(inputs.blocks, N, B)](
            added, total, inputs.A_ND, inputs.ids, first_BND, first, T, D, N, spans, SPAN,
            BACK=back, BS=BS, **OPTIONS,
        )  # fmt: skip
    last_BSND = walk(first, y, states, None)
    return last_BSND[:, 0 if back else -1]


def _first(inputs: _Inputs, state_BDN: Tensor | None) -> Tensor:
    if state_BDN is None:
        return inputs.A_ND.new_zeros(len(inputs.x), *inputs.A_ND.shape)
    return state_BDN.float().mT.contiguous()


def forward(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    state_BDN: Tensor | None = None,
    segments: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [B, T, D] in the dtype of x, the final state [B, D, N] in float32, and what `backward` takes.

    That is the states between chunks where `keep` says that it will be called, and else empty.
    """
    inputs = _inputs(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    states = inputs.A_ND.new_empty(kept_shape(x_BTD, A_DN) if keep else 0)
    groups = A_DN.shape[1] // _states_at_once(A_DN.shape[1])
    parts = torch.empty(groups, *x_BTD.shape, device=x_BTD.device, dtype=x_BTD.dtype if groups == 1 else torch.float32)
    last_BND = _walk(inputs, _first(inputs, state_BDN), y=parts, states=states if keep else None)
    y = parts[0]
    if groups > 1:
        y = torch.add(reduce(torch.add, parts[:-1]), parts[-1], out=torch.empty_like(inputs.x))
    return y, last_BND.mT.contiguous(), states


def backward(
    grads: tuple[Tensor, Tensor],
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    segments: Tensor | None,
    states_BMND: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state, given the states that `forward` kept."""
    inputs = _inputs(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    B, T, D, N = inputs.shape
    dy = grads[0].contiguous()
    later = torch.empty_like(states_BMND)
    dstate_BND = _walk(inputs, grads[1].float().mT.contiguous(), back=True, dy=dy, states=later)
    dx, ddt = torch.empty_like(inputs.x), torch.empty_like(inputs.dt)
    parts = inputs.A_ND.new_empty(inputs.blocks, B, 2, N, inputs.chunks * BT)
    kernels.scan_bwd_kernel[(inputs.blocks * inputs.chunks, 1, B)](
        dy, inputs.x, inputs.dt, inputs.A_ND, inputs.B_BNT, inputs.C_BNT, inputs.ids, states_BMND, later,
        dx, ddt, parts, T, D, N, inputs.chunks, BT=BT, **OPTIONS,
    )  # fmt: skip
    dB_BNT, dC_BNT = parts.sum(0)[..., :T].unbind(1)
    return (
        dx,
        ddt,
        later.sum((0, 1)).T.to(A_DN.dtype).contiguous(),
        dB_BNT.mT.to(B_BTN.dtype).contiguous(),
        dC_BNT.mT.to(C_BTN.dtype).contiguous(),
        dstate_BND.mT.contiguous(),
    )
