"""What is recomputed in the backward pass, and what activation checkpointing keeps: small and expensive results."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C import _functorch as functorch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Result = TypeVar("Result")

#: Kinds of devices on which `recomputed` recomputes: where memory is short, and what is not a product is quick.
RECOMPUTED = ("cuda",)

_SAVED: set[Callable[..., Any]] = set()


def save_under_checkpointing(op: Callable[..., Any]) -> None:
    """Keep the results of an operator of `torch.ops` under activation checkpointing instead of recomputing them."""
    _SAVED.add(op)


#: Operators whose results take longer to make again than all that lies between them.
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


#: For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keep_choice)`: the backward pass
#: recomputes everything except the choices of Top-1 chunk and Top-1 element, 4 bytes per query.
keep_choice = partial(create_selective_checkpoint_contexts, _policy)


def _policy_of_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else _policy(ctx, op)


#: The same, but results of matrix products and of attention are kept too.
keep_products = partial(create_selective_checkpoint_contexts, _policy_of_products)


def transformed() -> bool:
    """Whether a transform of torch.func runs, which does not support recomputation, and `vmap` no look at numbers."""
    return not torch.compiler.is_compiling() and bool(functorch.get_interpreter_stack())


def recomputed(function: Callable[[], Result], device: torch.device) -> Result:
    """Return function(); on a GPU the backward pass computes again what it needs of it, instead of keeping that.

    For functions without random numbers that make large tensors of small ones by little work. An op at their end that
    keeps its inputs alone runs again in uncompiled code only.

    Args:
        function: a function of the tensors that it closes over.
        device: the device of these.
    """
    if device.type not in RECOMPUTED or not torch.is_grad_enabled() or transformed():
        return function()
    found: Result = checkpoint(function, use_reentrant=False, preserve_rng_state=False)
    return found


def repeated(function: Callable[..., Result], *given: Any) -> Result:
    """Return function(*given); on any device, the backward pass calls it again instead of keeping what it needs of it.

    Compiled code, and passes without gradients, do not need that: they keep nothing of a part anyway.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return function(*given)
    found: Result = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
    return found
