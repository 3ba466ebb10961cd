"""What a CUDA graph does, on a CPU: operations are recorded with their tensors and sizes, and run again on these.

A capture leaves every tensor as it was, what Python computes in it is frozen, and reading a number back is an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Refusing(TorchDispatchMode):
    """Refuses operations for which Python waits for the GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(function, args):
            raise RuntimeError("operation not permitted when stream is capturing.\nmore")
        return function(*args, **(kwargs or {}))


class _Recorder(Refusing):
    """Records operations while they run, and what they overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.overwritten: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.overwritten += [(tensor, tensor.clone()) for tensor in _written(function, args, kwargs)]
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.calls.append((function, args, kwargs, result))
        return result


def _waits(function: Any, args: Any) -> bool:
    """Return whether a GPU would have to tell a number or a shape."""
    if function is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    shape = torch.Tag.dynamic_output_shape in function.tags
    return shape or function is torch.ops.aten._local_scalar_dense.default


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    found: list[Any] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def recorded(run: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of `run`, whose operations change no tensor before it, as a capture does."""
    recorder = _Recorder()
    try:
        with recorder:
            run()
    finally:
        with torch.no_grad():
            for tensor, old in reversed(recorder.overwritten):
                tensor.copy_(old)

    @torch.no_grad()
    def replay() -> None:
        for function, args, kwargs, result in recorder.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return replay
