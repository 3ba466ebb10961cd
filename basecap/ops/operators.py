"""Custom operators of PyTorch that cost their callers little: called directly where nothing has to see an operator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.utils._python_dispatch import _get_current_dispatch_mode

_PLAIN = (Tensor, torch.nn.Parameter)


class Operator:
    """A function of tensors as the custom operator `name`, with the methods of `torch.library.custom_op`'s result.

    `torch.compile`, selective checkpointing, fake tensors and other modes and subclasses see the operator. A call that
    none of them watches runs the function itself, inside one `torch.autograd.Function` where gradients are wanted:
    PyTorch's own way to an operator in Python costs about a quarter of a millisecond of the caller's time. Arguments
    are given by position.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], mutates_args: Sequence[str], tags: Sequence[torch.Tag]
    ) -> None:
        self.definition = torch.library.custom_op(name, function, mutates_args=mutates_args, tags=tags)
        #: The operator as the dispatcher knows it.
        self.overload = self.definition._opoverload
        self._function = function
        # PyTorch counts changes in place, so that a backward pass does not read changed numbers as the old ones.
        self._mutates = len(mutates_args) > 0
        # The backward pass gets the gradients of a list as a list.
        self._lists = any(isinstance(x.type, torch.ListType) for x in self.overload._schema.returns)
        self._backward: Callable[..., Any] | None = None
        self._setup: Callable[..., None] | None = None
        self.__doc__ = function.__doc__

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the function that returns the results' shapes; see `torch.library.register_fake`."""
        return self.definition.register_fake(function)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """Set the backward pass and what it saves; see `torch.library.register_autograd`."""
        self._backward, self._setup = backward, setup_context
        self.definition.register_autograd(backward, setup_context=setup_context)

    def __call__(self, *given: Any) -> Any:
        """Return what the function returns."""
        if torch.compiler.is_compiling() or self._mutates or _watched(given):
            return self.overload(*given)
        if not torch.is_grad_enabled() or not _require_gradients(given):
            return self.run(given)
        if self._backward is None or self._lists:
            return self.overload(*given)
        flat, widths = _flatten(given)
        return _Direct.apply(*flat, self, widths)

    def run(self, given: Sequence[Any]) -> Any:
        """Return what the function returns, whose operations autograd does not see.

        It would take results that are parts of other tensors for views, which callers could not change in place.
        """
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._function(*given)


def operator(
    name: str, mutates_args: Sequence[str] = (), tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that makes a function the custom operator `name`; see `torch.library.custom_op`."""
    return lambda function: Operator(name, function, mutates_args, tags)


class _Direct(torch.autograd.Function):
    """Calls an operator's function and its backward pass; tensors in lists are arguments of their own."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *flat, operator, widths = given
        ctx.operator, ctx.widths = operator, widths
        inputs = _nest(flat, widths)
        output = operator.run(inputs)
        if operator._setup is not None:
            operator._setup(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = ctx.operator._backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        widened = [
            [None] * width if grad is None and width is not None else grad
            for grad, width in zip(found, ctx.widths, strict=True)
        ]
        return *_flatten(widened)[0], None, None


def _flatten(given: Sequence[Any]) -> tuple[list[Any], tuple[int | None, ...]]:
    """Return the arguments with lists spread out, and each list's length, None for what is no list."""
    flat: list[Any] = []
    widths: list[int | None] = []
    for x in given:
        if isinstance(x, (list, tuple)):
            flat.extend(x)
            widths.append(len(x))
        else:
            flat.append(x)
            widths.append(None)
    return flat, tuple(widths)


def _nest(flat: Sequence[Any], widths: Sequence[int | None]) -> tuple[Any, ...]:
    """Return the arguments that `_flatten` spread out."""
    nested: list[Any] = []
    at = 0
    for width in widths:
        nested.append(flat[at] if width is None else list(flat[at : at + width]))
        at += 1 if width is None else width
    return tuple(nested)


def _watched(given: Sequence[Any]) -> bool:
    """Whether a mode, a transform, a trace or a kind of tensor has to see the operator."""
    if _get_current_dispatch_mode() is not None or functorch.peek_interpreter_stack() is not None:
        return True
    return torch._C._is_tracing() or _has_special(given)


def _has_special(given: Sequence[Any]) -> bool:
    """Whether a tensor is more than its memory; one that `is_neg` stands for the negative of it."""
    for x in given:
        if type(x) in _PLAIN:
            if x.is_meta or x.is_neg() or functorch.is_legacy_batchedtensor(x):
                return True
        elif isinstance(x, (list, tuple)):
            if _has_special(x):
                return True
        elif isinstance(x, Tensor):
            return True
    return False


def _require_gradients(given: Sequence[Any]) -> bool:
    """Whether a tensor requires gradients; all are plain."""
    for x in given:
        if type(x) in _PLAIN:
            if x.requires_grad:
                return True
        elif isinstance(x, (list, tuple)) and _require_gradients(x):
            return True
    return False
