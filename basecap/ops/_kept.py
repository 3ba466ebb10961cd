"""Tensors that depend on sizes alone, made once for all calls with these sizes."""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from basecap.ops._kinds import kinds_of

Made = TypeVar("Made")

#: What is kept of one kind, beside what CUDA graphs read; beyond this much all is forgotten.
MOST_KEPT = 32


class Kept(Generic[Made]):
    """Returns what `make` returns for some sizes and a device, from an earlier call where there was one.

    Args:
        make: takes sizes and, last, a device.
        tensors: returns the tensors in what `make` returns.
    """

    def __init__(self, make: Callable[..., Made], tensors: Callable[[Made], Sequence[Tensor | None]]) -> None:
        self.make = make
        self.tensors = tensors
        #: By the arguments and the stream that computes with it: another stream may come before it is computed.
        self.kept: dict[tuple[Hashable, int], Made] = {}
        #: What a CUDA graph reads, for ever.
        self.in_graphs: dict[Hashable, Made] = {}

    def __call__(self, *key: Hashable) -> Made:
        """Return what is made of these sizes on this device."""
        device = key[-1]
        assert isinstance(device, torch.device)
        if _captures(device):
            # All streams were waited for before a capture.
            every = [*self.in_graphs.items(), *((other, x) for (other, _), x in [*self.kept.items()])]
            found = next((x for other, x in every if other == key), None)
            if found is None:
                return self.make(*key)  # only the graph computes it, so that nothing else may use it
            self.in_graphs[key] = found
            return found
        own = (key, _stream(device))
        found = self.kept.get(own, self.in_graphs.get(key))
        if found is None:
            with torch.inference_mode(False):  # what is kept may be used in a training step next
                found = self.make(*key)
            if kinds_of(self.tensors(found), []) is None:  # a mode or a transform made it and alone can use it
                return found
            if len(self.kept) >= MOST_KEPT:
                self.kept.clear()
            self.kept[own] = found
        return found


def is_plain(x: Tensor) -> bool:
    """Whether what calls with this tensor make may be kept: traced tensors must not be."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def _captures(device: torch.device) -> bool:
    return _is_cuda(device) and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index) if _is_cuda(device) else 0


@cache
def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"  # the name is made anew each time
