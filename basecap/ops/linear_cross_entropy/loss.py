"""The loss and its gradients in one pass over chunks of tokens.

The gradient of the mean loss is known as soon as the logits are, so each chunk's logits are used for both and dropped:
the backward pass only scales what the forward pass left. This saves the second product with the head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import families
from basecap.ops._transforms import refuse_create_graph
from basecap.ops.linear_cross_entropy import eager, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return hidden.dtype
    return torch.get_autocast_dtype(kind)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def token_losses(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int) -> Tensor:
    """Return [N] losses, zero where the target is negative."""
    dtype = _product_dtype(hidden_ND)
    weight = weight_VD.to(dtype)
    parts = []
    for h, wanted in zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True):
        logits = (h.to(dtype) @ weight.T).to(_wide(dtype))
        parts.append(F.cross_entropy(logits, wanted.clamp(min=0), reduction="none").masked_fill(wanted < 0, 0.0))
    return torch.cat(parts)


class MeanLoss(torch.autograd.Function):
    """Mean cross-entropy over the targets that are not negative."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int, family: str, keep: bool
    ) -> Tensor:
        """Return the scalar loss by one of FAMILIES; `keep` the gradients with respect to hidden and weight."""
        dtype = _product_dtype(hidden_ND)
        weight = weight_VD.to(dtype)
        count = (targets_N >= 0).sum().clamp(min=1)
        loss = torch.zeros((), dtype=_wide(dtype), device=hidden_ND.device)
        grad_hidden = []
        grad_weight = torch.zeros(weight_VD.shape if keep else 0, dtype=_wide(dtype), device=weight_VD.device)
        for h, wanted in zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True):
            logits = h.to(dtype) @ weight.T
            losses, gradient = FAMILIES[family].rows(logits, wanted, count)
            loss = loss + losses.sum()
            if keep:
                grad_hidden.append((gradient @ weight).to(hidden_ND.dtype))
                grad_weight += gradient.T @ h.to(dtype)
        if keep:
            ctx.save_for_backward(torch.cat(grad_hidden), grad_weight.to(weight_VD.dtype))
        return loss / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        """Scale the gradients kept by the forward pass."""
        refuse_create_graph("linear_cross_entropy")  # what was kept has no derivatives
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None, None, None
