"""Refuse derivatives that custom operators lack: they support only the backward pass of torch.autograd."""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from basecap.errors import ConfigError
from basecap.ops._dispatch import constant_result

_BY_TORCH_FUNC = (
    "{op} cannot be transformed by torch.func (grad, vjp, jvp, vmap) here; "
    "take gradients with torch.autograd.grad or backward(), and give it a batch instead of vmap."
)
_BATCHED = "{op} has no batched gradients (is_grads_batched, vectorize); take them one by one."
_TWICE = "{op} has no second derivatives; differentiate it once, without create_graph."


def _unmapped(x: Tensor) -> Tensor:
    """Return the tensor below `vmap`: inside of it, no tensor seems to require a gradient."""
    while functorch.is_batchedtensor(x):
        x = functorch.get_unwrapped(x)
    return x


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Return whether a backward pass may reach one of these tensors."""
    if not torch.is_grad_enabled():
        return False
    given = [x for x in tensors if x is not None]
    return any((x if torch.compiler.is_compiling() else _unmapped(x)).requires_grad for x in given)


@constant_result
def _differentiated() -> bool:
    """Return whether code is traced inside torch.func.grad, vjp or jvp."""
    kinds = functorch.TransformType.Grad, functorch.TransformType.Jvp
    return any(level.key() in kinds for level in functorch.get_interpreter_stack() or ())


def refuse_transforms(op: str, *tensors: Tensor | None) -> None:
    """Raise ConfigError for derivatives of custom operators other than the backward pass of torch.autograd.

    PyTorch does not support others: forward mode returns zeros, and the errors of torch.func do not help.

    Args:
        op: name of the op, for the message.
        tensors: the tensors that the operators take.
    """
    if torch.compiler.is_compiling():
        if _differentiated():  # compiled code would return zeros
            raise ConfigError(_BY_TORCH_FUNC.format(op=op))
        return
    if forward_ad._current_level >= 0:
        duals = [forward_ad.unpack_dual(x) for x in tensors if x is not None]
        if any(dual.tangent is not None for dual in duals):
            raise ConfigError(
                f"{op} has no forward-mode derivatives (jvp, jacfwd); use torch.autograd.grad or backward()."
            )
    levels = functorch.get_interpreter_stack()
    if levels and any(level.key() == functorch.TransformType.Grad for level in levels) and wants_gradients(*tensors):
        raise ConfigError(_BY_TORCH_FUNC.format(op=op))


def refuse_mapping(op: str, *tensors: Tensor) -> None:
    """Raise ConfigError for tensors under `vmap`: PyTorch does not map operators that take lists."""
    if torch.compiler.is_compiling() or functorch.peek_interpreter_stack() is None:
        return
    if any(functorch.is_batchedtensor(x) for x in tensors):
        raise ConfigError(_BY_TORCH_FUNC.format(op=op))


def refuse_all_transforms(op: str, *tensors: Tensor | None) -> None:
    """Raise ConfigError as `refuse_transforms` does, and inside any transform, which the operation does not support."""
    refuse_transforms(op, *tensors)
    if not torch.compiler.is_compiling() and functorch.get_interpreter_stack():
        raise ConfigError(_BY_TORCH_FUNC.format(op=op))


def refuse_create_graph(op: str) -> None:
    """Raise ConfigError in a backward pass with create_graph, because second derivatives would lack terms."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ConfigError(_TWICE.format(op=op))


def no_second_derivatives(op: str) -> Callable[..., NoReturn]:
    """Return the backward pass of an operator that is itself a backward pass: it raises ConfigError."""

    def refuse(ctx: object, *grads: Tensor | None) -> NoReturn:
        raise ConfigError(_TWICE.format(op=op))

    return refuse


def refuse_batched_gradients(op: str, *grads: Tensor | None) -> None:
    """Raise ConfigError in a backward pass of many gradients at once, where PyTorch cannot map it over them."""
    if torch.compiler.is_compiling():
        return
    if any(functorch.is_legacy_batchedtensor(grad) for grad in grads if grad is not None):
        raise ConfigError(_BATCHED.format(op=op))
