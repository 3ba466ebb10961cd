"""Kernels run in Triton's interpreter where there is no GPU; memory nobody has written is poison."""

import os
import sys

import numpy as np
import pytest
import torch

from basecap.ops import _dispatch, _replay
from basecap.ops._dispatch import interpreted

if not torch.cuda.is_available() and "triton" not in sys.modules:
    # Triton reads this once, when it is imported first.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def no_numba() -> None:
    """Compile kernels for CPUs, unlike in other folders."""


@pytest.fixture(autouse=True)
def unrecorded() -> None:
    """Forget launches and decisions of before: a test may change a constant, or fill memory that a kernel gets."""
    _replay.forget()
    _dispatch.forget()


@torch.no_grad()
def _poison(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(float("nan") if x.is_floating_point() else -(1 << 30))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised tensors with NaN, or with an index far outside."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, make=make, **k: _poison(make(*a, **k)))


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter sum up products as compiled code does in float32: one after the other, from the total on."""
    if not interpreted():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, total: TensorHandle, *_) -> TensorHandle:
        left, right, found = (x.data.astype(np.float64) for x in (a, b, total))
        for k in range(left.shape[1]):
            # A multiply-add rounds once: products of two numbers in float32 are exact in float64.
            found = (found + left[:, k, None] * right[None, k]).astype(np.float32)
        return TensorHandle(found.astype(total.data.dtype), total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
