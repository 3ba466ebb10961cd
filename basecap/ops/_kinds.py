"""What the work of a function of tensors depends on: of its tensors all but the numbers in them, of the rest all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_VALUES = (type(None), bool, int, str)


class Saved(list[Tensor]):
    """What autograd saved in a call of which `call` tells the sizes, dtypes and devices: no hook may change these."""

    def __init__(self, tensors: Sequence[Tensor], call: object) -> None:
        super().__init__(tensors)
        self.call = call


def kinds_of(given: Sequence[Any], flat: list[Tensor]) -> tuple[Any, ...] | None:
    """Return what kinds of arguments these are, to compare and to hash, and add the tensors to `flat`.

    Shapes, strides, dtypes, devices and alignment of tensors, which of them begin at one address, and numbers, strings
    and None. Lists count as the tensors in them. The result is None where a tensor is more or less than its
    memory, as one that is traced, mapped or sparse or stands for the negative of its numbers, and where an argument is
    of another type.
    """
    parts: list[Any] = []
    described: list[Tensor] = []
    try:
        if not _sort(given, flat, described, parts):
            return None
        addresses = [x.data_ptr() for x in flat]
        parts += [(x.shape, x.stride(), x.dtype, x.device) for x in described]
    except RuntimeError:  # a tensor has no memory of its own, or is nested
        return None
    if True in [x.is_neg() or x.is_meta for x in described]:
        return None
    parts += [address % 16 for address in addresses]
    if len({*addresses}) < len(addresses):
        parts += [addresses.index(address) for address in addresses]
    return tuple(parts)


def _sort(given: Sequence[Any], flat: list[Tensor], described: list[Tensor], parts: list[Any]) -> bool:
    """Add all tensors to `flat` and those that are to be described, the rest to `parts`; False: one has no kind."""
    for x in given:
        kind = type(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            flat.append(x)
            described.append(x)
            parts.append(Tensor)
        elif kind is list or kind is tuple:
            parts.append(len(x))
            if not _sort(x, flat, described, parts):
                return False
        elif kind is float:
            # 0.0 and -0.0 are equal, and a NaN is not equal to itself.
            parts += kind, x if x > 0 else x.hex()
        elif kind in _VALUES:
            parts += kind, x  # True, 1 and 1.0 are equal
        elif kind is Saved:
            flat += x
            parts += x.call, *[saved.stride() for saved in x]
        else:
            return False
    return True
