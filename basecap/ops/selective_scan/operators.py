"""The selective scan as PyTorch operators: one node each in a compiled graph."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.selective_scan import eager
from basecap.ops.selective_scan.sizes import kept_shape

TRAINING = " training"


def _implementation(run: str) -> ModuleType:
    # Triton and Numba are only needed, and only installed, where their kernels can run.
    if run == "triton":
        from basecap.ops.selective_scan.gpu import launch

        return launch
    if run == "numba":
        from basecap.ops.selective_scan.cpu import launch as launch_cpu

        return launch_cpu
    return eager


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

    `run` is "eager", "triton" or "numba", followed by TRAINING where gradients will be wanted; otherwise no states are
    kept.
    """
    keep = run.endswith(TRAINING)
    return _implementation(run.removesuffix(TRAINING)).forward(x, dt, A, B, C, state, segments, keep=keep)


@torch.library.custom_op("basecap::selective_scan_backward", mutates_args=())
def scan_backward(
    given: list[Tensor],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    segments: Tensor | None,
    run: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state.

    `given` are those of the outputs and the final state, and the states that `scan` kept.
    """
    dy, dfinal, states = given
    implementation = _implementation(run.removesuffix(TRAINING))
    return implementation.backward((dy, dfinal), x, dt, A, B, C, segments, states)


def _fake_state(x: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], *A.shape, dtype=torch.promote_types(dt.dtype, torch.float32))


@scan.register_fake
def _(x, dt, A, B, C, state, segments, run):
    eagerly = run.startswith("eager")
    state = _fake_state(x, dt, A)
    state = state if eagerly else state.float()
    shape = eager.kept_shape(x, A) if eagerly else kept_shape(x, A, run.removesuffix(TRAINING))
    return x.new_empty(x.shape), state, state.new_empty(shape if run.endswith(TRAINING) else (0,))


@scan_backward.register_fake
def _(given, x, dt, A, B, C, segments, run):
    parts = (part.new_empty(part.shape) for part in (x, dt, A, B, C))
    return *parts, given[2].new_empty(x.shape[0], *A.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.run = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # zeros for the states kept would be as large as these
    ctx.save_for_backward(*tensors, output[2])


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    refuse_batched_gradients("selective_scan", dy, dfinal)
    x, dt, A, B, C, state, segments, states = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dfinal = torch.zeros_like(_fake_state(x, dt, A)) if dfinal is None else dfinal
    *grads, dstate = scan_backward([dy, dfinal, states], x, dt, A, B, C, segments, ctx.run)
    return *grads, None if state is None else dstate.to(state.dtype), None, None


scan.register_autograd(_gradients, setup_context=_save)
scan_backward.register_autograd(no_second_derivatives("selective_scan"))
