"""The losses of rows of logits and their gradients in plain PyTorch."""

import torch
from torch import Tensor

from basecap.ops._dispatch import EAGER

RUNS, BACKEND = EAGER, "eager"


def supports(hidden: Tensor) -> None:
    """Return None: this runs everywhere."""


def rows(logits_NV: Tensor, targets_N: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses [N] and their gradient [N, V] over `count`; zero where the target is negative."""
    kept = (targets_N >= 0)[:, None]
    index = targets_N.clamp(min=0)[:, None]
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    log_probabilities = logits_NV.to(wide).log_softmax(-1)
    losses = -log_probabilities.gather(1, index).masked_fill(~kept, 0.0)[:, 0]
    gradient = log_probabilities.exp()
    gradient.scatter_add_(1, index, -torch.ones_like(index, dtype=gradient.dtype))
    return losses, (gradient * (kept.to(wide) / count)).to(logits_NV.dtype)
