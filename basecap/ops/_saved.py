"""Results that activation checkpointing keeps: those that are small and expensive to recompute."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_SAVED: set[Callable[..., Any]] = set()


def save_under_checkpointing(op: Callable[..., Any]) -> None:
    """Keep the results of an operator of `torch.ops` under activation checkpointing instead of recomputing them."""
    _SAVED.add(op)


def _policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


#: For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keep_choice)`: the backward pass
#: recomputes everything except the choices of Top-1 chunk and Top-1 element, 4 bytes per query.
keep_choice = partial(create_selective_checkpoint_contexts, _policy)
