"""Workers that start at once."""

import pytest

from tests.forks import FORKS


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be forks of a process that has imported everything, which takes each of them four seconds."""
    monkeypatch.setattr("basecap.system.processes.START_METHOD", FORKS.get_start_method())
