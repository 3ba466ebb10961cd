"""The choices and the loss as PyTorch operators, each one node of a compiled graph. `family` is one of FAMILIES."""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import families, functions_of, without_autocast
from basecap.ops._transforms import refuse_create_graph
from basecap.ops.operators import operator
from basecap.ops.token_choice import eager, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


@operator("basecap::choose_by_index")
def choose_by_index(q: Tensor, k: Tensor, weights: Tensor, segments: Tensor | None, top: int, family: str) -> Tensor:
    """Return bool [B, T, T], the tokens that each query reads."""
    with without_autocast(q.device):
        chosen: Tensor = functions_of(FAMILIES[family]).choose_by_index(q, k, weights, segments, top)
    return chosen


@choose_by_index.register_fake
def _(q, k, weights, segments, top, family):
    B, T = q.shape[:2]
    return q.new_empty(B, T, T, dtype=torch.bool)


@operator("basecap::choose_by_mass")
def choose_by_mass(q: Tensor, k: Tensor, segments: Tensor | None, top: int, family: str) -> Tensor:
    """Return bool [B, T, T], the tokens that each query reads."""
    with without_autocast(q.device):
        chosen: Tensor = functions_of(FAMILIES[family]).choose_by_mass(q, k, segments, top)
    return chosen


@choose_by_mass.register_fake
def _(q, k, segments, top, family):
    B, T = q.shape[:2]
    return q.new_empty(B, T, T, dtype=torch.bool)


@operator("basecap::index_divergence")
def diverge(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    heads: list[Tensor],
    chosen: Tensor | None,
    segments: Tensor | None,
    learn: bool,
    family: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss and what its gradients are multiples of.

    Args:
        index_q: queries of the indexer [B, T, I, J].
        index_k: its keys [B, T, J].
        weights: of its heads [B, T, I].
        heads: queries [B, T, H, K] and keys [B, T, G, K] of attention.
        chosen: bool [B, T, T], what the loss is over, or None.
        segments: integers [B, T], or None.
        learn: whether gradients are wanted.
        family: see above.

    Returns:
        The mean divergence, and the gradients of the sum over all queries with respect to `index_q`, `index_k` and
        `weights`, without elements unless `learn`; all in float32 or wider.
    """
    run = functions_of(FAMILIES[family]).divergence
    with without_autocast(index_q.device):
        loss, dq, dk, dweights = run(index_q, index_k, weights, heads, chosen, segments, learn)
    return loss, dq, dk, dweights


@diverge.register_fake
def _(index_q, index_k, weights, heads, chosen, segments, learn, family):
    wide = torch.promote_types(index_q.dtype, torch.float32)
    grads = (x.new_empty(x.shape if learn else 0, dtype=wide) for x in (index_q, index_k, weights))
    return index_q.new_empty((), dtype=wide), *grads


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtypes = [x.dtype for x in inputs[:3]]
    ctx.tokens = max(1, inputs[0].shape[0] * inputs[0].shape[1])
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor, *_: None) -> tuple[Any, ...]:
    refuse_create_graph("index_divergence")
    grads = [(dloss / ctx.tokens * x).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
    return *grads, [None, None], None, None, None, None


diverge.register_autograd(_backward, setup_context=_setup)
