"""Launches the Triton kernels of the selective scan."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from basecap.ops._launch import registers
from basecap.ops.selective_scan.triton_kernels import BT, kept_shape, kernels

#: Channels per program.
BD = 32
#: Programs that keep a GPU busy; an H200 has room for 1584.
BUSY = 900
#: The most tokens of a row that a program walks from end to end: what is rounded between chunks adds up.
WHOLE = 2048
#: Where rows are longer or not enough programs, the tokens that one walks forward and backward: multiples of BT.
SPAN, SPAN_BACKWARD = 512, 256
#: Channels or tokens of a program that turns inputs and gradients.
BX = 64
#: Spans that are chained at a time.
BS = 16
#: One warp a program, 12 on a multiprocessor by its 65,536 registers.
WARPS, REGISTERS = 1, 168


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

    def span(self, groups: int, short: int) -> int:
        """Tokens of a program: a row's where `groups` programs a row and block are enough, else the `short` number."""
        B, T, _, _ = self.shape
        return WHOLE if T <= WHOLE and groups * B * self.blocks >= BUSY else short


def _options() -> dict[str, int | None]:
    """Return the options that all kernels take."""
    return {"BD": BD, "num_warps": WARPS, **registers(REGISTERS)}


def _inputs(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, segments: Tensor | None) -> _Inputs:
    rows, T, D = x.shape
    N, padded = A.shape[1], triton.cdiv(T, BT) * BT
    B_BNT, C_BNT = (A.new_empty(rows, N, padded, dtype=torch.float32) for _ in range(2))
    A_ND = A.new_empty(N, D, dtype=torch.float32)
    kernels.prepare_fwd_kernel[(triton.cdiv(D, BX) + rows * triton.cdiv(padded, BX),)](
        A, B, C, A_ND, B_BNT, C_BNT, T, D, N, padded, *A.stride(), *B.stride(), *C.stride(), BX=BX
    )
    ids = None if segments is None else segments.contiguous()
    return _Inputs(x.contiguous(), dt.contiguous(), A_ND, B_BNT, C_BNT, ids)


def _walk(
    inputs: _Inputs, carried_BSND: Tensor, span: int, *, dy: Tensor | None = None, y: Tensor | None = None,
    states: Tensor | None = None, total: Tensor | None = None,
) -> None:  # fmt: skip
    """Run the recurrence through every span, given `dy` that of the gradients; see the kernel."""
    B, T, D, N = inputs.shape
    x, W = (inputs.x, inputs.B_BNT) if dy is None else (dy, inputs.C_BNT)
    groups = 1 if y is None else len(y)
    kernels.walk_fwd_kernel[(inputs.blocks * groups, carried_BSND.shape[1], B)](
        x, inputs.dt, inputs.A_ND, W, inputs.C_BNT, inputs.ids, carried_BSND, y, states, total,
        T, D, N, inputs.chunks, span, BACK=dy is not None, BT=BT, BN=N // groups, **_options(),
    )  # fmt: skip


def _entering(inputs: _Inputs, first_BDN: Tensor | None, span: int, dy: Tensor | None = None) -> Tensor:
    """Return what enters every span [B, spans, N, D], in new memory; with `dy`, the gradients from the end.

    `first_BDN` enters the first span, nothing where it is None; with `dy`, the last one.
    """
    B, T, D, N = inputs.shape
    spans = triton.cdiv(T, span)
    first = None
    if first_BDN is not None:
        first = inputs.A_ND.new_empty(B, 1, N, D).copy_(first_BDN.mT[:, None])
    if spans == 1:
        return inputs.A_ND.new_zeros(B, 1, N, D) if first is None else first
    added = inputs.A_ND.new_zeros(B, spans, N, D)
    total = inputs.A_ND.new_empty(B, spans, D)
    _walk(inputs, added, span, dy=dy, total=total)
    entering = torch.empty_like(added)
    kernels.carry_fwd_kernel[(inputs.blocks, N, B)](
        added, total, inputs.A_ND, inputs.ids, first, entering, T, D, N, spans, span,
        BACK=dy is not None, BS=BS, **_options(),
    )  # fmt: skip
    return entering


def forward(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    state_BDN: Tensor | None,
    segments: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [B, T, D] in the dtype of x, the final state [B, D, N] in float32, and what `backward` takes.

    That is the states between chunks where `keep` says that it will be called, and else empty.
    """
    inputs = _inputs(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    states = inputs.A_ND.new_empty(kept_shape(x_BTD, A_DN) if keep else 0)
    # Where programs are few, two share a row's states, and their outputs are added up.
    groups = 1 if inputs.blocks * len(x_BTD) >= BUSY or A_DN.shape[1] % 2 else 2
    parts = torch.empty(groups, *x_BTD.shape, device=x_BTD.device, dtype=x_BTD.dtype if groups == 1 else torch.float32)
    span = inputs.span(groups, SPAN)
    carried = _entering(inputs, state_BDN, span)
    _walk(inputs, carried, span, y=parts, states=states if keep else None)
    y = parts[0] if groups == 1 else torch.add(parts[0], parts[1], out=torch.empty_like(inputs.x))
    return y, carried[:, -1].mT.contiguous(), states


def backward(
    grads: tuple[Tensor, Tensor | None],
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
    span = inputs.span(1, SPAN_BACKWARD)
    carried = _entering(inputs, grads[1], span, dy)
    dx, ddt = torch.empty_like(inputs.x), torch.empty_like(inputs.dt)
    dA_BSND = torch.empty_like(carried, dtype=torch.float64)
    parts = inputs.A_ND.new_empty(inputs.blocks, B, 2, N, inputs.chunks * BT)
    kernels.scan_bwd_kernel[(inputs.blocks, carried.shape[1], B)](
        dy, inputs.x, inputs.dt, inputs.A_ND, inputs.B_BNT, inputs.C_BNT, inputs.ids, states_BMND, carried, dA_BSND,
        dx, ddt, parts, T, D, N, inputs.chunks, span, BT=BT, **_options(),
    )  # fmt: skip
    dA, dB, dC = (like.new_empty(like.shape) for like in (A_DN, B_BTN, C_BTN))
    dstate = carried.new_empty(B, D, N)
    kernels.turn_bwd_kernel[(triton.cdiv(D, BX) * (B + 1) + triton.cdiv(T, BX) * B,)](
        parts.sum(0), dA_BSND.sum((0, 1)), carried, dB, dC, dA, dstate,
        T, D, N, inputs.chunks * BT, carried.shape[1], BX=BX,
    )  # fmt: skip
    return dx, ddt, dA, dB, dC, dstate
