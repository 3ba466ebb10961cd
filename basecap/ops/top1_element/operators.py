"""The choice, the gathered values and their gradient as PyTorch operators; tokens are in one row of N = B * T.

`family` is one of FAMILIES.
"""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import families, functions_of, without_autocast
from basecap.ops._saved import save_under_checkpointing
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients, refuse_create_graph
from basecap.ops.attention import attention
from basecap.ops.attention.fused import backward as attention_backward
from basecap.ops.attention.fused import forward as attention_forward
from basecap.ops.operators import Direct, operator
from basecap.ops.top1_element import eager, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


@operator("basecap::top1_element_choose")
def choose(q: Tensor, k: Tensor, first: Tensor | None, length: int, family: str) -> Tensor:
    """Return int32 [N, H], the row of the chosen key.

    Args:
        q: [N, H, K].
        k: [N, G, K].
        first: int32 [N], the start of each token's sequence; None: all have `length` tokens.
        length: T.
        family: one of FAMILIES.
    """
    run = functions_of(FAMILIES[family]).choose
    # Under autocast plain PyTorch would round the scores to half precision.
    with without_autocast(q.device):
        return run(q, k, first, length)


@choose.register_fake
def _(q, k, first, length, family):
    return q.new_empty(q.shape[:2], dtype=torch.int32)


save_under_checkpointing(choose.overload)


@operator("basecap::top1_element_gather")
def gather(v: Tensor, choice: Tensor, family: str) -> Tensor:
    """Return [N, H, K], the chosen values."""
    out: Tensor = functions_of(FAMILIES[family]).gather(v, choice)
    return out


@gather.register_fake
def _(v, choice, family):
    return v.new_empty(*choice.shape, v.shape[2])


@operator("basecap::top1_element_scatter")
def scatter(do: Tensor, choice: Tensor, groups: int, family: str) -> Tensor:
    """Return [N, G, K], for each key the sum of do [N, H, K] over the queries that chose it; [B, T] are N as well."""
    out: Tensor = functions_of(FAMILIES[family]).scatter(do.flatten(0, -3), choice, groups)
    return out.view(*do.shape[:-2], groups, do.shape[-1])


@scatter.register_fake
def _(do, choice, groups, family):
    return do.new_empty(*do.shape[:-2], groups, do.shape[-1])


def _setup(ctx, inputs, output):
    v, choice, ctx.family = inputs
    ctx.groups = v.shape[1]
    ctx.save_for_backward(choice)


def _backward(ctx, do):
    return scatter(do, ctx.saved_tensors[0], ctx.groups, ctx.family), None, None


gather.register_autograd(_backward, setup_context=_setup)
scatter.register_autograd(no_second_derivatives("top1_element"))


class _StraightThrough(torch.autograd.Function):
    """Returns its first argument; both get its gradient. A difference to add would be NaN where the second is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(o: Tensor, soft: Tensor) -> Tensor:
        return o.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor]:
        # Some of PyTorch's attention kernels have second derivatives, which would lack the terms of v.
        refuse_create_graph("top1_element")
        return do, do


def _by_operators(q, k, v, soft, first, family, fused):
    if fused is not None:
        soft = attention(q, k, v.detach(), scale=fused[1])
    choice = choose(q.detach().flatten(0, 1), k.detach().flatten(0, 1), first, q.shape[1], family)
    o = gather(v.flatten(0, 1), choice, family).unflatten(0, q.shape[:2])
    return o if soft is None else _StraightThrough.apply(o, soft)


def _at_once(q, k, v, soft, first, family, fused):
    choice = choose.function(q.flatten(0, 1), k.flatten(0, 1), first, q.shape[1], family)
    return gather.function(v.flatten(0, 1), choice, family).view(q.shape), choice


def _setup_of_both(ctx, inputs, output):
    q, k, v, soft, _, ctx.family, ctx.fused = inputs
    ctx.soft = soft is not None
    ctx.groups = v.shape[2]
    if ctx.fused is None:
        ctx.save_for_backward(output[1])
        return
    number, scale = ctx.fused
    found = attention_forward(number, q, k, v, scale)
    ctx.numbers = [None if isinstance(item, Tensor) else item for item in found]
    ctx.save_for_backward(output[1], *[item if isinstance(item, Tensor) else None for item in found])


def _backward_of_both(ctx, do):
    refuse_batched_gradients("top1_element", do)
    if ctx.soft or ctx.fused is not None:  # see `_StraightThrough`
        refuse_create_graph("top1_element")
    choice, *saved = ctx.saved_tensors
    dv = scatter(do, choice, ctx.groups, ctx.family)
    dq = dk = None
    if ctx.fused is not None:
        number, scale = ctx.fused
        found = [x if other is None else other for x, other in zip(saved, ctx.numbers, strict=True)]
        dq, dk = attention_backward(number, do, found, scale)
    return dq, dk, dv, do if ctx.soft else None, None, None, None


#: Takes queries, keys and values [B, T, heads, K]; the attention whose gradient stands for that of the choice, or
#: None; `first` and `family` as `choose`; and, instead of that attention, the number of a fused kernel and the scale,
#: or None. Returns the values chosen.
select = Direct("top1_element", _at_once, seen=_by_operators, first=True)
select.register_autograd(_backward_of_both, setup_context=_setup_of_both)
