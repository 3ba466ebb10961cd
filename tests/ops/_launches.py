"""Stand-ins for Triton's launchers of compiled kernels, whose one kernel works on addresses of the CPU."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from basecap.ops._replay import recorder


def launch(
    x: int, y: int, z: int, stream: int, function: int, metadata: tuple[int, ...], watched: Any, enter: Any, leave: Any,
    out: Any, source: Any, n: int, number: float,
) -> None:  # fmt: skip
    """Add a number to each of n float32 numbers: out = source + number."""
    if enter is not None:
        enter(watched)
    kind = ctypes.c_float * n
    values = [value + number for value in kind.from_address(_address(source))]
    kind.from_address(_address(out))[:] = values


def _address(x: Any) -> int:
    return x.data_ptr() if hasattr(x, "data_ptr") else x.__index__()


class Utilities:
    """Makes descriptors: here the address itself, as an object."""

    def __init__(self) -> None:
        self.fill_tma_descriptor = lambda address, *sizes: SimpleNamespace(data_ptr=lambda: address)


UTILITIES = Utilities()


def through_descriptors(launcher: Callable[..., None]) -> Callable[..., None]:
    """Return a function that makes descriptors of tensors before it launches, as Triton's does."""

    def inner(*given: Any) -> None:
        *given, source, n, number = given
        if not isinstance(source, Tensor):
            source = UTILITIES.fill_tma_descriptor(source.base.data_ptr(), n)
        launcher(*given, source, n, number)

    return inner


class Launcher:
    """Stands for a launcher of compiled kernels. Counts its calls, which a record makes none of."""

    dispatched = 0

    def __init__(self, described: bool = False) -> None:
        self.launch = through_descriptors(launch) if described else launch

    def __call__(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        Launcher.dispatched += 1
        self.launch(x, y, z, stream, *given)


LAUNCHERS = Launcher(), Launcher(described=True)


def dispatch(*given: Any, launcher: Launcher | None = None) -> None:
    """Launch a kernel."""
    launcher = launcher or LAUNCHERS[not isinstance(given[1], Tensor)]
    launcher(1, 1, 1, 0, 7, (4, 1), {"name": "add"}, *recorder.launch_hooks(), *given)


class Elsewhere(Launcher):
    """Launches without what a record takes the launches from."""

    def __call__(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        """Launch."""
        Launcher.dispatched += 1
        launch(x, y, z, stream, *given)


class Nameless(Elsewhere):
    """Has nothing of that name."""

    def __init__(self) -> None:
        pass


class Boxing(Launcher):
    """Makes an object with an address in it for each launch, as that of a descriptor that no function is known to."""

    def __call__(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        """Launch."""
        Launcher.dispatched += 1
        *given, source, n, number = given
        self.launch(x, y, z, stream, *given, Boxed(source.data_ptr()), n, number)


class Boxed:
    """An address that Python cannot see."""

    def __init__(self, address: int) -> None:
        self.__address = address

    def __index__(self) -> int:
        return self.__address
