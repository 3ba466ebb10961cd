"""The passes as PyTorch operators: one compiled graph, and selective checkpointing can keep the choice.

Tokens stand in one row of N = B * T; `grid` and `own` come from `chunk_grid`.
"""

import torch
from torch import Tensor

from basecap.ops.top1_chunk import eager


def _kernels():
    # Triton is only needed, and only installed, where its kernels can run.
    from basecap.ops.top1_chunk import launch

    return launch


@torch.library.custom_op("basecap::top1_chunk_choose", mutates_args=())
def choose(
    q: Tensor,
    k: Tensor,
    grid: Tensor,
    own: Tensor,
    chunk: int,
    exact: bool,
    scale: float,
    remote: int,
    triton: bool,
) -> Tensor:
    """Return int32 [N, H, remote], the chosen chunks, -1 where there is none."""
    run = _kernels().choose if triton else eager.choose
    return run(q, k, grid, own, chunk, exact, scale, remote)


@choose.register_fake
def _(q, k, grid, own, chunk, exact, scale, remote, triton):
    return q.new_empty(*q.shape[:2], remote, dtype=torch.int32)


@torch.library.custom_op("basecap::top1_chunk_attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Tensor,
    grid: Tensor,
    own: Tensor,
    chunk: int,
    scale: float,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [N, H, K]; and for the backward pass the logsumexp of the attended scores [N, H] and an index."""
    run = _kernels().attend if triton else eager.attend
    return run(q, k, v, choice, grid, own, chunk, scale)


@attend.register_fake
def _(q, k, v, choice, grid, own, chunk, scale, triton):
    wide = torch.promote_types(q.dtype, torch.float32)
    index = choice.new_empty(0)
    if triton:
        launch = _kernels()
        index = launch.empty_index(choice, grid.shape[0], k.shape[1], launch.share_of(chunk)).buffer
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide), index


@torch.library.custom_op("basecap::top1_chunk_attend_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    index: Tensor,
    choice: Tensor,
    grid: Tensor,
    own: Tensor,
    chunk: int,
    scale: float,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv."""
    run = _kernels().attend_backward if triton else eager.attend_backward
    return run(do, q, k, v, o, lse, index, choice, grid, own, chunk, scale)


@attend_backward.register_fake
def _(do, q, k, v, o, lse, index, choice, grid, own, chunk, scale, triton):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output):
    q, k, v, choice, grid, own, ctx.chunk, ctx.scale, ctx.triton = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, *output, choice, grid, own)


def _backward(ctx, do, *_):
    grads = attend_backward(do, *ctx.saved_tensors, ctx.chunk, ctx.scale, ctx.triton)
    return *grads, None, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_setup)
