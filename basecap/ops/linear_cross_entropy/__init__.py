"""Cross-entropy of a linear head without the [tokens, vocabulary] matrix in memory."""

from typing import Literal

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, use_triton
from basecap.ops.linear_cross_entropy.eager import MeanLoss, token_losses


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reduction: Literal["mean", "none"] = "mean",
    chunk: int = 8192,
    backend: Backend = "auto",
) -> Tensor:
    """Return the loss -log softmax(hidden @ weight.T)[target] in nats, in float32 (float64 for float64).

    Args:
        hidden: [..., D], any floating dtype; under autocast the products run in its dtype.
        weight: [vocab, D].
        targets: int64 [...]; negative ones are left out.
        reduction: "mean" over the targets that count, differentiable; "none" gives [...], zero where left out,
            without gradient.
        chunk: tokens whose logits exist at one time.
        backend: of the mean: "auto", or insist on "eager" (plain PyTorch) or "triton".

    Raises:
        ConfigError: shapes that do not fit together, or an impossible backend.
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ConfigError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "do not fit; they must be [..., D], [vocab, D] and [...]."
        )
    flat, wanted = hidden.flatten(0, -2), targets.flatten()
    if reduction == "none":
        return token_losses(flat, weight, wanted, chunk).view(targets.shape)
    kernels = use_triton("linear_cross_entropy", backend, hidden)
    return MeanLoss.apply(flat, weight, wanted, chunk, kernels)
