"""The kernels of the scalar-decay recurrence as PyTorch operators, saving only the inputs."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import operator


@operator("basecap::ssd")
def scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V]."""
    return launch_of(__package__).forward(q, k, v, log_decay, state, segments)


@operator("basecap::ssd_backward")
def scan_backward(
    do: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the log decays and the first state."""
    return launch_of(__package__).backward((do, dfinal), q, k, v, log_decay, state, segments)


@scan.register_fake
def _(q, k, v, log_decay, state, segments):
    return v.new_empty(v.shape), state.new_empty(state.shape, dtype=torch.float32)


@scan_backward.register_fake
def _(do, dfinal, q, k, v, log_decay, state, segments):
    like = [part.new_empty(part.shape) for part in (q, k, v, log_decay)]
    return *like, state.new_empty(state.shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    return *scan_backward(do, dfinal, *ctx.saved_tensors), None


scan.register_autograd(_gradients, setup_context=_save)
scan_backward.register_autograd(no_second_derivatives("ssd"))
