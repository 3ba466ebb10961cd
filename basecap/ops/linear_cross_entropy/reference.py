"""The definition of the loss."""

from torch import Tensor


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of log sum exp(logits) - logits[target] over targets >= 0."""
    logits = hidden.flatten(0, -2) @ weight.T
    wanted = targets.flatten()
    kept = wanted >= 0
    picked = logits[kept].gather(1, wanted[kept][:, None])[:, 0]
    return (logits[kept].logsumexp(-1) - picked).mean()
