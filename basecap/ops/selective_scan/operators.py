"""The selective scan as PyTorch operators: one node each in a compiled graph."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops.selective_scan import eager

#: Tokens per chunk of the kernels: a warp's lanes hold neighbouring channels, their registers the tokens, so that the
#: scans need no exchange between lanes.
BT = 16


def kept_shape(x_BTD: Tensor, A_DN: Tensor) -> tuple[int, int, int, int]:
    """Return the shape [B, M, N, D] of the states between chunks."""
    B, T, D = x_BTD.shape
    return B, -(-T // BT), A_DN.shape[1], D


def _kernels() -> Any:
    # Triton is only needed, and only installed, where its kernels can run.
    from basecap.ops.selective_scan import launch

    return launch


@torch.library.custom_op("basecap::selective_scan", mutates_args=())
def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    segments: Tensor | None,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [B, T, D], the final state [B, D, N] and the states between chunks [B, M, N, D].

    `kernels` is "none", "forward", or "training", which fills the last, as it must where gradients will be wanted.
    """
    if kernels != "none":
        return _kernels().forward(x, dt, A, B, C, state, segments, keep=kernels == "training")
    return *eager.forward(x, dt, A, B, C, state, segments), x.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("basecap::selective_scan_backward", mutates_args=())
def scan_backward(
    grads: list[Tensor],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial: list[Tensor | None],
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state; `initial` holds that state and the segments.

    Without the states that `scan` fills in training the kernels do not run.
    """
    if states.numel():
        return _kernels().backward((grads[0], grads[1]), x, dt, A, B, C, initial[1], states)
    return eager.backward((grads[0], grads[1]), x, dt, A, B, C, *initial)


def _fake_state(x: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], *A.shape, dtype=torch.promote_types(dt.dtype, torch.float32))


@scan.register_fake
def _(x, dt, A, B, C, state, segments, kernels):
    shape = kept_shape(x, A) if kernels == "training" else (0,)
    state = _fake_state(x, dt, A)
    return x.new_empty(x.shape), state if kernels == "none" else state.float(), x.new_empty(shape, dtype=torch.float32)


@scan_backward.register_fake
def _(grads, x, dt, A, B, C, initial, states):
    dstate = _fake_state(x, dt, A)
    parts = (part.new_empty(part.shape) for part in (x, dt, A, B, C))
    return *parts, dstate.float() if states.numel() else dstate


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # zeros for the states between chunks would be as large as these
    ctx.save_for_backward(*tensors, output[2])


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    x, dt, A, B, C, state, segments, states = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dfinal = torch.zeros_like(_fake_state(x, dt, A)) if dfinal is None else dfinal
    *grads, dstate = scan_backward([dy, dfinal], x, dt, A, B, C, [state, segments], states)
    return *grads, None if state is None else dstate.to(state.dtype), None, None


scan.register_autograd(_gradients, setup_context=_save)
