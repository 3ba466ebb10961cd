"""The kernels of the scalar-decay recurrence as PyTorch operators, saving only the inputs."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import operator


@operator("basecap::ssd")
def scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V] in float32."""
    return launch_of(__package__).forward(q, k, v, log_decay, state, segments)


@operator("basecap::ssd_backward")
def scan_backward(
    do: Tensor | None,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the log decays and the first state; those of results are zero when None."""
    do = torch.zeros_like(v) if do is None else do
    return launch_of(__package__).backward((do, dfinal), q, k, v, log_decay, state, segments)


@scan.register_fake
def _(q, k, v, log_decay, state, segments):
    B, _, H, V = v.shape
    return v.new_empty(v.shape), v.new_empty(B, H, k.shape[3], V, dtype=torch.float32)


@scan_backward.register_fake
def _(do, dfinal, q, k, v, log_decay, state, segments):
    like = [part.new_empty(part.shape) for part in (q, k, v, log_decay)]
    return *like, v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, state, segments = ctx.saved_tensors
    *grads, dstate = scan_backward(do, dfinal, *tensors, state, segments)
    return *grads, None if state is None else dstate, None


scan.register_autograd(_gradients, setup_context=_save)
scan_backward.register_autograd(no_second_derivatives("ssd"))
