"""What the work of a function of tensors depends on: of its tensors all but the numbers in them, of the rest all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_VALUES = (type(None), bool, int, str)


def kinds_of(given: Sequence[Any], flat: list[Tensor]) -> tuple[Any, ...] | None:
    """Return what kinds of arguments these are, to compare and to hash, and add the tensors to `flat`.

    Shapes, strides, dtypes, devices and alignment of tensors, which of them begin at one address, and numbers, strings
    and None. Lists count as the tensors in them. The result is None where a tensor is more or less than its
    memory, as one that is traced, mapped or sparse or stands for the negative of its numbers, and where an argument is
    of another type.
    """
    parts: list[Any] = []
    addresses: list[int] = []
    try:
        if not _describe(given, flat, addresses, parts):
            return None
    except RuntimeError:  # a tensor has no memory of its own, or is nested
        return None
    if len({*addresses}) < len(addresses):
        parts += [addresses.index(address) for address in addresses]
    return tuple(parts)


def _describe(given: Sequence[Any], flat: list[Tensor], addresses: list[int], parts: list[Any]) -> bool:
    """Add each argument to the lists, what it is to `parts`; return False if one has no kind."""
    for x in given:
        kind = type(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            address = x.data_ptr()
            if x.is_neg() or (not address and (x.numel() or x.is_meta)):
                return False
            flat.append(x)
            addresses.append(address)
            parts.append((x.shape, x.stride(), x.dtype, x.device, address % 16))
        elif kind in _VALUES:
            parts += kind, x  # True, 1 and 1.0 are equal
        elif kind is float:
            # 0.0 and -0.0 are equal, and a NaN is not equal to itself.
            parts += kind, x if x > 0 else x.hex()
        elif kind is list or kind is tuple:
            parts.append(len(x))
            if not _describe(x, flat, addresses, parts):
                return False
        else:
            return False
    return True
