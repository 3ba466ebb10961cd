"""Custom operators of PyTorch that cost their callers little: called directly where nothing has to see an operator."""

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from basecap.ops._kinds import kinds_of
from basecap.ops._replay import Replayed


class Direct:
    """A function of tensors that is called as it is, or `seen`, which does the same, where something has to watch that.

    `torch.compile`, selective checkpointing, fake tensors and other modes and subclasses see the operators in `seen`. A
    call that none of them watches runs the function itself, from a record of its launches (see `_replay`), inside one
    `torch.autograd.Function` where gradients are wanted: PyTorch's own way to an operator in Python costs about a
    quarter of a millisecond of the caller's time. Arguments are given by position.

    Args:
        name: what autograd calls it.
        function: the function, which may return more than callers get: what only the backward pass takes.
        seen: what to call where something watches.
        first: whether callers only get the first of its results.
    """

    def __init__(self, name: str, function: Callable[..., Any], seen: Callable[..., Any], first: bool = False) -> None:
        self.name = name
        self.replayed = Replayed(function)
        self.first = first
        self._seen = seen
        self.backward: Callable[..., Any] | None = None
        self.setup: Callable[..., None] | None = None
        self._apply: Callable[..., Any] | None = None

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """Set the backward pass and what it saves; see `torch.library.register_autograd`."""
        self.backward, self.setup = backward, setup_context
        node = type(self.name, (_Node,), {})
        # Without what PyTorch does for transforms of torch.func, which see operators instead.
        self._apply = getattr(super(torch.autograd.Function, node), "apply")  # noqa: B009

    def __call__(self, *given: Any) -> Any:
        """Return what the function returns."""
        if watched():
            return self._seen(*given)
        flat: list[Tensor] = []
        kinds = kinds_of(given, flat)
        if kinds is None:
            return self._seen(*given)
        if not torch.is_grad_enabled() or True not in [x.requires_grad for x in flat]:
            output, _ = self.replayed.of(kinds, given, flat)
            return output[0] if self.first else output
        return self._seen(*given) if self._apply is None else self._apply(self, kinds, given, *flat)


class Operator:
    """A function of tensors as the custom operator `name`, with the methods of `torch.library.custom_op`'s result.

    It is called directly, see `Direct`, unless it changes its arguments.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], mutates_args: Sequence[str], tags: Sequence[torch.Tag]
    ) -> None:
        #: What the operator does, for functions that are called directly themselves.
        self.function = function
        self._direct = Direct(name.rpartition("::")[2], function, self._dispatch)
        replayed = function if mutates_args else wraps(function)(lambda *given: self._direct.replayed(*given))
        self.definition = torch.library.custom_op(name, replayed, mutates_args=mutates_args, tags=tags)
        #: The operator as the dispatcher knows it.
        self.overload = self.definition._opoverload
        # PyTorch counts changes in place, so that a backward pass does not read changed numbers as the old ones.
        self._call: Callable[..., Any] = self.overload if mutates_args else self._direct
        # The backward pass gets the gradients of a list as a list.
        self._lists = any(isinstance(x.type, torch.ListType) for x in self.overload._schema.returns)
        self.__doc__ = function.__doc__

    def _dispatch(self, *given: Any) -> Any:
        return self.overload(*given)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the function that returns the results' shapes; see `torch.library.register_fake`."""
        return self.definition.register_fake(function)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """Set the backward pass and what it saves; see `torch.library.register_autograd`."""
        self.definition.register_autograd(backward, setup_context=setup_context)
        if not self._lists:
            self._direct.register_autograd(backward, setup_context=setup_context)

    def __call__(self, *given: Any) -> Any:
        """Return what the function returns."""
        return self._call(*given)


def operator(
    name: str, mutates_args: Sequence[str] = (), tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that makes a function the custom operator `name`; see `torch.library.custom_op`."""
    return lambda function: Operator(name, function, mutates_args, tags)


class _Node(torch.autograd.Function):
    """Calls a function and its backward pass; `flat` are the tensors given, those in lists among them."""

    @staticmethod
    def forward(ctx: Any, direct: Direct, kinds: tuple[Any, ...], given: Sequence[Any], *flat: Tensor) -> Any:
        output, ctx.kind = direct.replayed.of(kinds, given, flat)
        ctx.direct = direct
        if direct.setup is not None:
            direct.setup(ctx, given, output)
        return output[0] if direct.first else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = ctx.direct.backward(ctx, *grads)
        flat: list[Tensor | None] = []
        for grad, tensor in zip(found if isinstance(found, tuple) else (found,), ctx.kind.tensors, strict=True):
            if tensor is True:
                flat.append(grad)
            elif tensor:
                flat += [None] * sum(tensor) if grad is None else compress(grad, tensor)
        return None, None, None, *flat


def watched() -> bool:
    """Whether a compiler, a mode, a transform or a trace has to see operators."""
    if torch.compiler.is_compiling():
        return True
    if _get_current_dispatch_mode() is not None or functorch.peek_interpreter_stack() is not None:
        return True
    return torch._C._is_tracing()
