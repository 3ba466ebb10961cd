"""Cross-entropy of a linear head without the [tokens, vocabulary] matrix in memory."""

from typing import Literal

import torch
from torch import Tensor

from basecap.errors import ConfigError, nearest
from basecap.ops._dispatch import Backend, check_backend, choose
from basecap.ops._shapes import check_devices, check_floating, check_tensor, is_whole
from basecap.ops._transforms import refuse_all_transforms, wants_gradients
from basecap.ops.linear_cross_entropy.loss import FAMILIES, MeanLoss, token_losses


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

    The mean supports first-order derivatives by torch.autograd; transforms of torch.func (grad, vjp, jvp, vmap),
    forward mode and second derivatives raise an error.

    Args:
        hidden: [..., D], any floating dtype; under autocast the products run in its dtype.
        weight: [vocab, D].
        targets: int64 [...], below vocab, else the kernels' loss is NaN; negative ones are left out.
        reduction: "mean" over the targets that count, differentiable; "none" gives [...], zero where left out,
            without gradient.
        chunk: tokens whose logits exist at one time.
        backend: of the mean: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, an invalid option or backend.
    """
    check_floating({"hidden": hidden, "weight": weight})
    check_tensor("targets", targets)
    if targets.dtype != torch.int64:
        raise ConfigError(f"targets must be torch.int64, not {targets.dtype}.")
    fits = weight.dim() == 2 and weight.shape[0] > 0 and hidden.dim() > 0
    if not fits or hidden.shape != (*targets.shape, weight.shape[1]):
        raise ConfigError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "do not fit; they must be [..., D], [vocab, D] and [...], with at least one row in the vocabulary."
        )
    check_devices({"hidden": hidden, "weight": weight, "targets": targets})
    if reduction not in ("mean", "none"):
        raise ConfigError(f"unknown reduction {reduction!r}: {nearest(reduction, ('mean', 'none'))}")
    if not is_whole(chunk) or chunk < 1:
        raise ConfigError(f"chunk must be an integer of at least 1, not {chunk!r}.")
    chunk = int(chunk)
    check_backend(backend)
    flat, wanted = hidden.reshape(targets.numel(), weight.shape[1]), targets.flatten()
    if reduction == "none":
        with torch.no_grad():  # gradients would need the logits of all chunks
            return token_losses(flat, weight, wanted, chunk).view(targets.shape)
    refuse_all_transforms("linear_cross_entropy", flat, weight)
    family = choose("linear_cross_entropy", backend, FAMILIES, hidden)
    return MeanLoss.apply(flat, weight, wanted, chunk, family, wants_gradients(flat, weight))
