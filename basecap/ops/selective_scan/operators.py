"""The selective scan as PyTorch operators: one node each in a compiled graph."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import no_second_derivatives, refuse_batched_gradients
from basecap.ops.selective_scan import eager
from basecap.ops.selective_scan.sizes import kept_shape


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
    run: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [B, T, D], the final state [B, D, N] and the states that the backward pass starts from.

    `run` is "eager" or "kernels", and where gradients will be wanted "eager training" or "kernels training"; otherwise
    no states are kept.
    """
    forward = _kernels().forward if run.startswith("kernels") else eager.forward
    return forward(x, dt, A, B, C, state, segments, keep=run.endswith("training"))


@torch.library.custom_op("basecap::selective_scan_backward", mutates_args=())
def scan_backward(
    grads: list[Tensor],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    segments: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state; `states` are those that `scan` kept."""
    # Those of the kernels have no axis of positions within a chunk.
    backward = _kernels().backward if states.dim() == 4 else eager.backward
    return backward((grads[0], grads[1]), x, dt, A, B, C, segments, states)


def _fake_state(x: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], *A.shape, dtype=torch.promote_types(dt.dtype, torch.float32))


@scan.register_fake
def _(x, dt, A, B, C, state, segments, run):
    kernels = run.startswith("kernels")
    state = _fake_state(x, dt, A)
    state = state.float() if kernels else state
    shape = kept_shape(x, A) if kernels else eager.kept_shape(x, A)
    return x.new_empty(x.shape), state, state.new_empty(shape if run.endswith("training") else (0,))


@scan_backward.register_fake
def _(grads, x, dt, A, B, C, segments, states):
    parts = (part.new_empty(part.shape) for part in (x, dt, A, B, C))
    return *parts, states.new_empty(x.shape[0], *A.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # zeros for the states kept would be as large as these
    ctx.save_for_backward(*tensors, output[2])


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    refuse_batched_gradients("selective_scan", dy, dfinal)
    x, dt, A, B, C, state, segments, states = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dfinal = torch.zeros_like(_fake_state(x, dt, A)) if dfinal is None else dfinal
    *grads, dstate = scan_backward([dy, dfinal], x, dt, A, B, C, segments, states)
    return *grads, None if state is None else dstate.to(state.dtype), None, None


scan.register_autograd(_gradients, setup_context=_save)
scan_backward.register_autograd(no_second_derivatives("selective_scan"))
