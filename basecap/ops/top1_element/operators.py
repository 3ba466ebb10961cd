"""The choice, the gathered values and their gradient as PyTorch operators; tokens are in one row of N = B * T.

`family` is one of FAMILIES.
"""

import torch
from torch import Tensor

from basecap.ops._dispatch import families, functions_of, without_autocast
from basecap.ops._saved import save_under_checkpointing
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import operator
from basecap.ops.top1_element import eager, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


@operator("basecap::top1_element_choose")
def choose(q: Tensor, k: Tensor, first: Tensor, family: str) -> Tensor:
    """Return int32 [N, H], the row of the chosen key; `first` int32 [N] is the start of each token's sequence."""
    run = functions_of(FAMILIES[family]).choose
    # Under autocast plain PyTorch would round the scores to half precision.
    with without_autocast(q.device):
        return run(q, k, first)


@choose.register_fake
def _(q, k, first, family):
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
    """Return [N, G, K], for each key the sum of do over the queries that chose it."""
    out: Tensor = functions_of(FAMILIES[family]).scatter(do, choice, groups)
    return out


@scatter.register_fake
def _(do, choice, groups, family):
    return do.new_empty(do.shape[0], groups, do.shape[2])


def _setup(ctx, inputs, output):
    v, choice, ctx.family = inputs
    ctx.groups = v.shape[1]
    ctx.save_for_backward(choice)


def _backward(ctx, do):
    return scatter(do, ctx.saved_tensors[0], ctx.groups, ctx.family), None, None


gather.register_autograd(_backward, setup_context=_setup)
scatter.register_autograd(no_second_derivatives("top1_element"))
