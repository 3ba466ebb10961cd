"""The selective scan as PyTorch custom operators, each one node of a compiled graph."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import families, functions_of
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.operators import operator
from basecap.ops.selective_scan import eager, numba_kernels, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, numba_kernels, eager)

TRAINING = " training"


def _family(run: str) -> ModuleType:
    return FAMILIES[run.removesuffix(TRAINING)]


@operator("basecap::selective_scan")
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

    `run` is one of FAMILIES, followed by TRAINING where gradients will be wanted; otherwise no states are kept.
    """
    keep = run.endswith(TRAINING)
    out: tuple[Tensor, Tensor, Tensor] = functions_of(_family(run)).forward(x, dt, A, B, C, state, segments, keep)
    return out


@operator("basecap::selective_scan_backward")
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

    `given` are those of the outputs, the states that `scan` kept and, unless there is none, that of the final state.
    """
    dy, states, *final = given
    dfinal = final[0] if final else None
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = functions_of(_family(run)).backward(
        (dy, dfinal), x, dt, A, B, C, segments, states
    )
    return grads


def _fake_state(x: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], *A.shape, dtype=torch.promote_types(dt.dtype, torch.float32))


@scan.register_fake
def _(x, dt, A, B, C, state, segments, run):
    family, state = _family(run), _fake_state(x, dt, A)
    state = state if family is eager else state.float()
    shape = family.kept_shape(x, A) if run.endswith(TRAINING) else (0,)
    return x.new_empty(x.shape), state, state.new_empty(shape)


@scan_backward.register_fake
def _(given, x, dt, A, B, C, segments, run):
    parts = (part.new_empty(part.shape) for part in (x, dt, A, B, C))
    return *parts, given[1].new_empty(x.shape[0], *A.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.run = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # zeros for the states kept would be as large as these
    ctx.save_for_backward(*tensors, output[2])


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    refuse_batched_gradients("selective_scan", dy, dfinal)
    x, dt, A, B, C, state, segments, states = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    final = [] if dfinal is None else [dfinal]
    *grads, dstate = scan_backward([dy, states, *final], x, dt, A, B, C, segments, ctx.run)
    return *grads, None if state is None else dstate.to(state.dtype), None, None


scan.register_autograd(_gradients, setup_context=_save)
scan_backward.register_autograd(no_second_derivatives("selective_scan"))
