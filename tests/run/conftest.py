"""The leak test asks processes that start at once."""

import pytest

from basecap.testing.fresh_process import FreshProcess
from tests.forks import Answering


@pytest.fixture(autouse=True)
def no_numba() -> None:
    """Compile kernels for CPUs, as the processes that these tests start do."""


@pytest.fixture(autouse=True)
def quick_leak_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the leak test of a trained model ask a fork; `testing/test_trained_model.py` asks new processes."""
    monkeypatch.setattr(FreshProcess, "__init__", lambda self: setattr(self, "_process", Answering()))
