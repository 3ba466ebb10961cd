"""The kernel as a PyTorch custom operator, one node of a compiled graph."""

import torch
from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops.operators import operator


@operator("basecap::cross_entropy_rows")
def rows(logits_NV: Tensor, targets_N: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 losses [N] and their gradient [N, V] over `count`; zero where the target is negative."""
    losses, gradient = launch_of(__package__).rows(logits_NV, targets_N, count)
    return losses, gradient


@rows.register_fake
def _(logits_NV, targets_N, count):
    return logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32), logits_NV.new_empty(logits_NV.shape)
