"""The passes as PyTorch custom operators: they compile to one graph, and checkpointing can keep the choice.

Tokens are in one row of N = B * T, or in B rows; `layout` is the pair that `chunk_grid` returns, `family` one of
FAMILIES. Autocast is disabled: in plain PyTorch it would round the scores to half precision.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from basecap.ops._dispatch import families, functions_of, without_autocast
from basecap.ops._saved import save_under_checkpointing
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.operators import Direct, operator
from basecap.ops.top1_chunk import eager, gluon_kernels, triton_kernels

#: The fastest first.
FAMILIES = families(gluon_kernels, triton_kernels, eager)


def _in_one_row(x: Tensor) -> Tensor:
    """Return [N, heads, K], here and not where gradients pass: each view would be a node of its own."""
    return x.flatten(0, -3)


@operator("basecap::top1_chunk_choose")
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
        return run(_in_one_row(q), _in_one_row(k), grid, own, chunk, exact, scale, remote)


@choose.register_fake
def _(q, k, layout, chunk, exact, scale, remote, family):
    return q.new_empty(*_in_one_row(q).shape[:2], remote, dtype=torch.int32)


save_under_checkpointing(choose.overload)


@operator("basecap::top1_chunk_attend")
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
    """Return o like q; and for the backward pass the logsumexp of the attended scores [N, H] and an index."""
    run = functions_of(FAMILIES[family]).attend
    grid, own = layout
    with without_autocast(q.device):
        o, lse, index = run(*(_in_one_row(x) for x in (q, k, v)), choice, grid, own, chunk, scale)
    return o.view(q.shape), lse, index


@attend.register_fake
def _(q, k, v, choice, layout, chunk, scale, family):
    wide = torch.promote_types(q.dtype, torch.float32)
    index = choice.new_empty(0)
    if family != "eager":
        from basecap.ops._selection.launch import new_index
        from basecap.ops.top1_chunk.triton_kernels.launch import share_of

        index = new_index(choice, layout[0].shape[0], k.shape[-2], share_of(chunk)).buffer
    return q.new_empty(q.shape), q.new_empty(choice.shape[:2], dtype=wide), index


@operator("basecap::top1_chunk_attend_backward")
def attend_backward(
    do: Tensor, saved: Sequence[Tensor], chunk: int, scale: float, family: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv; `saved` is q, k, v, o, logsumexp, index, choice and the layout."""
    run = functions_of(FAMILIES[family]).attend_backward
    rows = [_in_one_row(x) for x in saved[:4]]
    with without_autocast(do.device):
        dq, dk, dv = run(_in_one_row(do), [*rows, *saved[4:]], chunk, scale)
    return dq.view(saved[0].shape), dk.view(saved[1].shape), dv.view(saved[2].shape)


@attend_backward.register_fake
def _(do, saved, chunk, scale, family):
    q, k, v = (x.new_empty(x.shape) for x in saved[:3])
    return q, k, v


def _setup(ctx, inputs, output):
    q, k, v, choice, layout, ctx.chunk, ctx.scale, ctx.family = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, *output, choice, *layout)


def _gradients(ctx, do):
    refuse_batched_gradients("top1_chunk", do)
    return attend_backward(do, ctx.saved_tensors, ctx.chunk, ctx.scale, ctx.family)


def _backward(ctx, do, *_):
    return *_gradients(ctx, do), None, [None, None], None, None, None


attend.register_autograd(_backward, setup_context=_setup)
attend_backward.register_autograd(no_second_derivatives("top1_chunk"))


def _by_operators(q, k, v, layout, how):
    choice = choose(q.detach(), k.detach(), layout, *how)
    chunk, _, scale, _, family = how
    return attend(q, k, v, choice, layout, chunk, scale, family)[0]


def _at_once(q, k, v, layout, how):
    choice = choose.function(q, k, layout, *how)
    chunk, _, scale, _, family = how
    return *attend.function(q, k, v, choice, layout, chunk, scale, family), choice


def _setup_of_both(ctx, inputs, output):
    q, k, v, layout, (ctx.chunk, _, ctx.scale, _, ctx.family) = inputs
    ctx.save_for_backward(q, k, v, *output, *layout)


def _backward_of_both(ctx, do):
    return *_gradients(ctx, do), [None, None], None


#: Takes queries, keys, values, the layout, and in a tuple what `choose` takes behind that; returns the outputs.
choose_and_attend = Direct("top1_chunk", _at_once, seen=_by_operators, first=True)
choose_and_attend.register_autograd(_backward_of_both, setup_context=_setup_of_both)
