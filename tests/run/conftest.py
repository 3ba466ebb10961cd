"""Processes that start at once: workers, and those of the leak test."""

import pytest

from basecap.testing.fresh_process import FreshProcess
from tests.forks import FORKS, Answering


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be forks of a process that has imported everything, which takes each of them four seconds."""
    monkeypatch.setattr("basecap.system.processes.START_METHOD", FORKS.get_start_method())


@pytest.fixture(autouse=True)
def quick_leak_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the leak test of a trained model ask a fork; `testing/test_trained_model.py` asks new processes."""
    monkeypatch.setattr(FreshProcess, "__init__", lambda self: setattr(self, "_process", Answering()))
