"""The kernels of the recurrence of several writes and reads as PyTorch operators, saving only the inputs.

`tensors` are log decays and strengths now and kept [B, T, H], biases of q and k [H, R, K], cosines and sines of the
angles [B, T, H, A], and the first state [B, H, K, V].
"""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import operator


@operator("basecap::ssd_mimo")
def scan(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, R, H, V] and the final state [B, H, K, V]."""
    return launch_of(__package__).forward(q, k, v, tensors, segments)


@operator("basecap::ssd_mimo_backward")
def scan_backward(
    grads: list[Tensor], q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], segments: Tensor | None
) -> list[Tensor]:
    """Return the gradients of q, k, v and the `tensors`."""
    return launch_of(__package__).backward(grads, q, k, v, tensors, segments)


@scan.register_fake
def _(q, k, v, tensors, segments):
    return v.new_empty(v.shape), v.new_empty(tensors[-1].shape, dtype=torch.float32)


@scan_backward.register_fake
def _(grads, q, k, v, tensors, segments):
    like = [x.new_empty(x.shape) for x in (q, k, v, *tensors[:-1])]
    return [*like, v.new_empty(tensors[-1].shape, dtype=torch.float32)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tensors, segments = inputs
    ctx.save_for_backward(q, k, v, segments, *tensors)


def _gradients(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    q, k, v, segments, *tensors = ctx.saved_tensors
    dq, dk, dv, *rest = scan_backward([*grads], q, k, v, tensors, segments)
    return dq, dk, dv, rest, None


scan.register_autograd(_gradients, setup_context=_save)
scan_backward.register_autograd(no_second_derivatives("ssd_mimo"))
