"""Activation checkpointing that keeps the choice, so that the selection pass never runs twice."""

from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def _policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    if op is torch.ops.basecap.top1_chunk_choose.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


#: For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keep_choice)`: everything is computed
#: again in the backward pass but the chosen chunks, 4 bytes for each query.
keep_choice = partial(create_selective_checkpoint_contexts, _policy)
