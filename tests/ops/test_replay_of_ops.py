"""Records of every op with kernels: Triton's interpreter runs the kernels on the addresses that a record gives them."""

import ctypes
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from basecap.ops import _replay
from basecap.ops._dispatch import interpreted
from basecap.ops._replay import record, recorder
from basecap.ops.wkv7.triton_chunks import operators as wkv7
from basecap.testing.check_op import OPS

#: Tokens by the op's case: several chunks where that is quick.
TOKENS = {
    "delta rule": 17, "long convolution": 40, "selective scan": 5, "short convolution": 20, "ssd": 40,
    "taylor attention": 40, "top1-chunk exact": 40, "top1-chunk approx": 40, "top1-element": 40, "wkv4": 20,
    "wkv6": 40, "wkv6 by tokens, heads of 96": 3, "wkv7": 40,
}  # fmt: skip
ordinary = GridExecutor.__call__


class Launcher:
    """Stands for the launcher of a compiled kernel. Counts its calls, which a record makes none of."""

    dispatched = 0

    def __init__(self, executor: GridExecutor, options: Mapping[str, Any], dtypes: list[torch.dtype | None]) -> None:
        def launch(x: int, y: int, z: int, stream: int, *given: Any) -> None:
            with _disable_current_modes():
                tensors = [arg if dtype is None else _at(arg, dtype) for arg, dtype in zip(given, dtypes, strict=True)]
                ordinary(executor, *tensors, **options)

        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        Launcher.dispatched += 1
        self.launch(x, y, z, stream, *given)


def _at(address: int | Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(address, Tensor) or not address:
        return address if isinstance(address, Tensor) else torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_byte * dtype.itemsize).from_address(address), dtype=dtype)


def _launch(executor: GridExecutor, *given: Any, **options: Any) -> None:
    dtypes = [x.dtype if isinstance(x, Tensor) else None for x in given]
    Launcher(executor, options, dtypes)(1, 1, 1, 0, *given)


def _called(name: str, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return results and gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    found = wkv7.scan(*leaves, None, None)[:2] if name == "wkv7" else OPS[name].kernels(*leaves)
    found = [found] if isinstance(found, Tensor) else list(found)
    grads = torch.autograd.grad(sum(x.square().sum() for x in found), leaves)
    return [*(x.detach() for x in found), *grads]


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", TOKENS)
def test_the_third_call_is_a_replay_with_the_bits_of_the_first(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_replay, "DEVICES", ("cpu",))
    monkeypatch.setattr(recorder, "launcher_class", lambda: Launcher)
    monkeypatch.setattr(recorder, "driver_utilities", lambda: None)
    monkeypatch.setattr(record, "current_stream", lambda: lambda device: 0)
    monkeypatch.setattr(GridExecutor, "__call__", _launch)
    generator = torch.Generator().manual_seed(0)
    first, second = (
        OPS[name].inputs(lambda *shape: torch.randn(shape, generator=generator), TOKENS[name]) for _ in range(2)
    )
    expected = _called(name, first)
    _called(name, second)
    assert Launcher.dispatched
    monkeypatch.setattr(Launcher, "dispatched", 0)
    found = _called(name, first)
    assert Launcher.dispatched == 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
