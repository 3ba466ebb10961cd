"""Kernels run in Triton's interpreter where there is no GPU; memory nobody has written is poison."""

import os
import sys

import pytest
import torch

from basecap.ops import _replay

if not torch.cuda.is_available() and "triton" not in sys.modules:
    # Triton reads this once, when it is imported first.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def unrecorded() -> None:
    """Forget launches that were recorded before: a test may change a constant, or fill memory that a kernel gets."""
    _replay.forget()


@torch.no_grad()
def _poison(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(float("nan") if x.is_floating_point() else -(1 << 30))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised tensors with NaN, or with an index far outside."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, make=make, **k: _poison(make(*a, **k)))
