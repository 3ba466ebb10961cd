"""The kernels as a PyTorch custom operator with its backward pass, one node of a compiled graph; O(T) memory."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import operator

#: Tokens per chunk. Sums of features cost as much as masked tiles at about 1024 (16 features, 64 values); without any
#: sums, short sequences are twice as fast.
CHUNK = 2048


@operator("basecap::taylor_attention")
def attend(q: Tensor, k: Tensor, v: Tensor, eps: float, chunk: int) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and denominators [B, T, H], float32."""
    return launch_of(__package__).forward(q, k, v, eps, chunk)


@attend.register_fake
def _(q, k, v, eps, chunk):
    return v.new_empty(v.shape), v.new_empty(v.shape[:3], dtype=torch.float32)


@operator("basecap::taylor_attention_backward")
def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, norm: Tensor, do: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    return launch_of(__package__).backward(q, k, v, o, norm, do, chunk)


@attend_backward.register_fake
def _(q, k, v, o, norm, do, chunk):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, _, ctx.chunk = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor, _norm: Tensor | None) -> tuple[Tensor | None, ...]:
    return *attend_backward(*ctx.saved_tensors, do, ctx.chunk), None, None


attend.register_autograd(_backward, setup_context=_setup)
attend_backward.register_autograd(no_second_derivatives("taylor_attention"))
