"""The passes as PyTorch custom operators: they compile to one graph, and checkpointing can keep the choice.

Tokens are in one row of N = B * T; `layout` is the pair that `chunk_grid` returns, `family` one of FAMILIES. Autocast
is disabled: in plain PyTorch it would round the scores to half precision.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from basecap.ops._dispatch import families, functions_of, without_autocast
from basecap.ops._saved import save_under_checkpointing
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.top1_chunk import eager, gluon_kernels, triton_kernels

#: The fastest first.
FAMILIES = families(gluon_kernels, triton_kernels, eager)


@torch.library.custom_op("basecap::top1_chunk_choose", mutates_args=())
def choose(
    q: Tensor,
    k: Tensor,
    layout: Sequence[Tensor],
    chunk: int,
    exact: bool,
    scale: float,
    remote: int,
    family: str,
) -> Tensor:
    """Return int32 [N, H, remote], the chosen chunks, -1 where there is none."""
    run = functions_of(FAMILIES[family]).choose
    grid, own = layout
    with without_autocast(q.device):
        return run(q, k, grid, own, chunk, exact, scale, remote)


@choose.register_fake
def _(q, k, layout, chunk, exact, scale, remote, family):
    return q.new_empty(*q.shape[:2], remote, dtype=torch.int32)


save_under_checkpointing(torch.ops.basecap.top1_chunk_choose.default)


@torch.library.custom_op("basecap::top1_chunk_attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Tensor,
    layout: Sequence[Tensor],
    chunk: int,
    scale: float,
    family: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [N, H, K]; and for the backward pass the logsumexp of the attended scores [N, H] and an index."""
    run = functions_of(FAMILIES[family]).attend
    grid, own = layout
    with without_autocast(q.device):
        return run(q, k, v, choice, grid, own, chunk, scale)


@attend.register_fake
def _(q, k, v, choice, layout, chunk, scale, family):
    wide = torch.promote_types(q.dtype, torch.float32)
    index = choice.new_empty(0)
    if family != "eager":
        from basecap.ops._selection.launch import empty_index
        from basecap.ops.top1_chunk.triton_kernels.launch import share_of

        index = empty_index(choice, layout[0].shape[0], k.shape[1], share_of(chunk)).buffer
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide), index


@torch.library.custom_op("basecap::top1_chunk_attend_backward", mutates_args=())
def attend_backward(
    do: Tensor, saved: Sequence[Tensor], chunk: int, scale: float, family: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv; `saved` is q, k, v, o, logsumexp, index, choice and the layout."""
    run = functions_of(FAMILIES[family]).attend_backward
    with without_autocast(do.device):
        return run(do, saved, chunk, scale)


@attend_backward.register_fake
def _(do, saved, chunk, scale, family):
    q, k, v = (x.new_empty(x.shape) for x in saved[:3])
    return q, k, v


def _setup(ctx, inputs, output):
    q, k, v, choice, layout, ctx.chunk, ctx.scale, ctx.family = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, *output, choice, *layout)


def _backward(ctx, do, *_):
    refuse_batched_gradients("top1_chunk", do)
    grads = attend_backward(do, ctx.saved_tensors, ctx.chunk, ctx.scale, ctx.family)
    return *grads, None, [None, None], None, None, None


attend.register_autograd(_backward, setup_context=_setup)
attend_backward.register_autograd(no_second_derivatives("top1_chunk"))
