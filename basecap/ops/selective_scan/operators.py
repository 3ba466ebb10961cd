"""The selective scan as PyTorch operators: one node each in a compiled graph, saving nothing but the inputs."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops.selective_scan import eager


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
    triton: bool,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, D] and the final state [B, D, N]."""
    run = _kernels().forward if triton else eager.forward
    return run(x, dt, A, B, C, state, segments)


@torch.library.custom_op("basecap::selective_scan_backward", mutates_args=())
def scan_backward(
    grads: list[Tensor],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial: list[Tensor | None],
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state; `initial` holds that state and the segments."""
    run = _kernels().backward if triton else eager.backward
    return run((grads[0], grads[1]), x, dt, A, B, C, initial[0], initial[1])


def _fake_state(x: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], *A.shape, dtype=torch.promote_types(dt.dtype, torch.float32))


@scan.register_fake
def _(x, dt, A, B, C, state, segments, triton):
    return x.new_empty(x.shape), _fake_state(x, dt, A)


@scan_backward.register_fake
def _(grads, x, dt, A, B, C, initial, triton):
    return *(part.new_empty(part.shape) for part in (x, dt, A, B, C)), _fake_state(x, dt, A)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.triton = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    x, dt, A, B, C, state, segments = ctx.saved_tensors
    *grads, dstate = scan_backward([dy, dfinal], x, dt, A, B, C, [state, segments], ctx.triton)
    return *grads, None if state is None else dstate.to(state.dtype), None, None


scan.register_autograd(_gradients, setup_context=_save)
