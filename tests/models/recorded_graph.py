"""What a CUDA graph does, on a CPU: operations are recorded with their tensors and sizes, and run again on these."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    """Records operations while they run, and what they overwrite. Reading a number back is refused, as by a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.overwritten: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(function, args):
            raise RuntimeError("operation not permitted when stream is capturing.\nmore")
        for argument, given in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.overwritten.append((given, given.clone()))
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result


def _waits(function: Any, args: Any) -> bool:
    """Return whether a GPU would have to tell a number or a shape."""
    if function is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    shape = torch.Tag.dynamic_output_shape in function.tags
    return shape or function is torch.ops.aten._local_scalar_dense.default


def recorded(run: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of `run`, whose operations change no tensor before it, as a capture does."""
    recorder = _Recorder()
    try:
        with recorder:
            run()
    finally:
        for tensor, old in reversed(recorder.overwritten):
            tensor.copy_(old)

    def replay() -> None:
        for function, args, kwargs, result in recorder.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return replay
