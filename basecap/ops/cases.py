"""What `check.py` of an op is made of: cases, each a way to call the op, with how to draw its inputs.

`basecap.testing.check_op` finds the modules `basecap.ops.<op>.check` and compares what they name. Each has

    FUNCTIONS: tuple[str, ...]   the functions that every family of the op has
    CASES: dict[str, Case]       by the names that `basecap check` shows

Nothing else imports them: who uses an op pays for no check.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

Function = Callable[..., Any]
#: Takes a shape and returns standard normal float32 numbers.
Draw = Callable[..., Tensor]

#: Rows, heads, channels of a head; channels, states of a channel.
B, H, K = 2, 2, 32
D, N = 48, 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to call an op: functions of the same tensors that return one tensor or several.

    Attributes:
        plain: the op in plain PyTorch, or with PyTorch's kernels if basecap has no kernels.
        definition: the formula.
        inputs: takes a `Draw` and a number of tokens and draws the tensors, float32 by name; those in `wide` stay
            float32, the others take the dtype under test.
        families: the implementations that the op chooses from.
        wide: see `inputs`.
        kernels: the op with Triton kernels; None: there are none.
        numba: the op with kernels for CPUs; None: there are none.
        cuda: the kernels have no backend name and run if the tensors are on a GPU.
        half: most of their products are in the dtype of the tensors, so outputs are compared in that dtype.
    """

    plain: Function
    definition: Function
    inputs: Callable[[Draw, int], Mapping[str, Tensor]]
    families: Mapping[str, ModuleType]
    wide: tuple[str, ...] = ()
    kernels: Function | None = None
    numba: Function | None = None
    cuda: bool = False
    half: bool = False


def by_backend(
    op: Function,
    definition: Function,
    inputs: Callable[[Draw, int], Mapping[str, Tensor]],
    families: Mapping[str, ModuleType],
    wide: tuple[str, ...] = (),
) -> Case:
    """Return the case of an op whose argument `backend` says what runs."""
    kernels, plain, numba = (partial(op, backend=backend) for backend in ("triton", "eager", "numba"))
    return Case(
        kernels=kernels,
        numba=numba if any(family.BACKEND == "numba" for family in families.values()) else None,
        plain=plain,
        definition=definition,
        inputs=inputs,
        wide=wide,
        families=families,
    )
