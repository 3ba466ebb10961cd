"""Launches the kernel of the cross-entropy."""

import torch
import triton
from torch import Tensor

from basecap.ops.linear_cross_entropy.triton_kernels import kernels


def rows(logits_NV: Tensor, targets_N: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 losses [N] and their gradient [N, V] over `count`; zero where the target is negative."""
    N, V = logits_NV.shape
    logits = logits_NV.contiguous()
    losses, gradient = logits.new_empty(N, dtype=torch.float32), torch.empty_like(logits)
    kernels.rows_kernel[(N,)](
        logits, targets_N.contiguous(), count, losses, gradient, V,
        BLOCK=min(8192, triton.next_power_of_2(V)), num_warps=8,
    )  # fmt: skip
    return losses, gradient
