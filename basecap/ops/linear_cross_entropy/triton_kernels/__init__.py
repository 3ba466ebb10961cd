"""The losses of rows of logits and their gradients in Triton."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton
from basecap.ops.linear_cross_entropy.triton_kernels import operators

RUNS, BACKEND = TRITON, "triton"


def supports(hidden: Tensor) -> str | None:
    """Return why the kernel cannot run, or None."""
    return unsupported_by_triton(hidden)


def rows(logits_NV: Tensor, targets_N: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 losses [N] and their gradient [N, V] over `count`; zero where the target is negative."""
    losses, gradient = operators.rows(logits_NV, targets_N, count)
    return losses, gradient
