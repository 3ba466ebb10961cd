"""Launches the selective scan's kernels for the CPU."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from basecap.ops._recurrence.blocks import starts
from basecap.ops.selective_scan.numba_kernels import kept_shape, kernels, tokens_per_chunk
from basecap.ops.selective_scan.numba_kernels.kernels_parts import launch


@dataclass(frozen=True)
class _Inputs:
    """Inputs as the kernels take them: in float32, contiguous."""

    x: Tensor
    dt: Tensor
    A_ND: Tensor
    B: Tensor
    C: Tensor
    begins: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return them in the order of the kernels' arguments."""
        return self.x, self.dt, self.A_ND, self.B, self.C, self.begins

    def launch(self, kernel: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        """Run a kernel on all rows."""
        launch(
            kernel, tensors, [tokens_per_chunk(self.x.shape[1])], rows=len(self.x), work=self.x.numel() * len(self.A_ND)
        )


def _inputs(x: Tensor, dt: Tensor, A_DN: Tensor, B: Tensor, C: Tensor, segments: Tensor | None) -> _Inputs:
    new = starts(segments)
    begins = torch.zeros(x.shape[:2], dtype=torch.bool) if new is None else new
    x, dt, B, C = (part.detach().float().contiguous() for part in (x, dt, B, C))
    # Finite, so that a decay of 0 has the gradient 0.
    A_ND = (A_DN.detach().float().T / math.log(2)).contiguous().clamp_(min=torch.finfo(torch.float32).min)
    return _Inputs(x, dt, A_ND, B, C, begins)


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

    That is the states before each chunk [B, M, N, D] where `keep` says that it will be called.
    """
    inputs = _inputs(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    B, _, N, D = shape = kept_shape(x_BTD, A_DN)
    state = torch.zeros(B, N, D, dtype=torch.float64)
    if state_BDN is not None:
        state.copy_(state_BDN.detach().mT)
    y, kept = inputs.x.new_zeros(x_BTD.shape), inputs.x.new_empty(shape if keep else (0, 0, 0, 0))
    inputs.launch(kernels.scan_fwd_kernel, [*inputs.tensors(), state, y, kept])
    return y.to(x_BTD.dtype), state.mT.float().contiguous(), kept if keep else kept.flatten()


def backward(
    grads: tuple[Tensor, Tensor | None],
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    segments: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state, given the states that `forward` kept."""
    inputs = _inputs(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    dy = grads[0].detach().float().contiguous()
    dstate = dy.new_zeros(len(dy), A_DN.shape[1], A_DN.shape[0], dtype=torch.float64)
    if grads[1] is not None:
        dstate.copy_(grads[1].detach().mT)
    du, ddt, dA = torch.zeros_like(dy), torch.zeros_like(dy), torch.zeros_like(dstate)
    dB, dC = torch.empty_like(inputs.B), torch.empty_like(inputs.C)
    outs = (dstate, du, ddt, dA, dB, dC)
    inputs.launch(kernels.scan_bwd_kernel, [dy, *inputs.tensors(), states, *outs])
    # The kernels' exponents are powers of two.
    ddt.mul_(math.log(2)).addcmul_(inputs.x, du)
    return (
        du.mul_(inputs.dt).to(x_BTD.dtype),
        ddt.to(dt_BTD.dtype),
        dA.sum(0).T.to(A_DN.dtype).contiguous(),
        dB.to(B_BTN.dtype),
        dC.to(C_BTN.dtype),
        dstate.mT.float().contiguous(),
    )
