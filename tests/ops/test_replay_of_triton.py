"""Records of what the launcher of the installed Triton does for NVIDIA's GPUs, with a stand-in for its code in C."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from basecap.ops import _replay
from basecap.ops._replay import Replayed, recorder


class Map:
    """A descriptor as C holds it: Python does not see its address."""

    def __init__(self, address: int) -> None:
        self.__index__ = None
        self._held = address


def floats(x: Any, n: int) -> Any:
    address = x._held if isinstance(x, Map) else x if isinstance(x, int) else x.data_ptr()
    return (ctypes.c_float * n).from_address(address)


class Utilities:
    """Triton's functions in C."""

    def __init__(self) -> None:
        self.launched = 0
        self.fill_tma_descriptor = self.fill_tma_descriptor_tiled = lambda address, *options: Map(address)

    def launch(self, *given: Any) -> None:
        """Add a number to each of n float32 numbers: out = source + number; on the stream 5."""
        assert given[3] == 5
        self.launched += 1
        # Before Triton 3.7 the kernel's arguments stand behind those of the launch, whose formats one string has.
        own = given[-1] if isinstance(given[-1], (list, tuple)) else given[len(nvidia._BASE_ARGS_FORMAT) :]
        out, source, *_, n, number = own
        floats(out, n)[:] = [value + number for value in floats(source, n)]


def launcher_of(utilities: Utilities, described: bool) -> Any:
    """Return what Triton makes for a kernel that takes two addresses or descriptors, and two numbers."""
    launcher = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    kind = "tensordesc<fp32[8]>" if described else "*fp32"
    signature = dict(enumerate(("*fp32", kind, "i32", "fp32")))
    meta = (
        [{"swizzle": 0, "elem_size": 4, "elem_type": 7, "block_size": [8], "fp4_padded": False}] if described else None
    )
    launcher.launch = nvidia.wrap_handle_tensordesc(utilities.launch, signature, meta)
    launcher.arg_annotations, launcher.kernel_signature, launcher.num_ctas = [object() for _ in signature], b"\x01", 1
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.launch_cooperative_grid = launcher.launch_pdl = launcher.gsan_enabled = False
    return launcher


@pytest.mark.parametrize("described", [False, True])
def test_the_installed_launcher_is_recorded(described: bool, monkeypatch: pytest.MonkeyPatch):
    utilities = Utilities()
    active = SimpleNamespace(launcher_cls=nvidia.CudaLauncher, utils=utilities, get_current_stream=lambda device: 5)
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(_replay, "DEVICES", ("cpu",))
    launcher, dispatched = launcher_of(utilities, described), []

    def add(x: Tensor) -> Tensor:
        between, out = torch.empty_like(x), torch.empty_like(x)
        for source, target in ((x, between), (between, out)):
            dispatched.append(source)
            given = TensorDescriptor(source, [8], [1], [8]) if described else source
            launcher(1, 1, 1, 5, 7, (4, 1, 0), None, *recorder.launch_hooks(), target, given, 8, 1.5)
        return out

    wrapped = Replayed(add)
    for _ in range(4):
        x = torch.randn(8)
        dispatched.clear()
        torch.testing.assert_close(wrapped(x), x + 3)
    assert not dispatched and utilities.launched == 8
