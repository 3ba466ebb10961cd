"""Every test is cut off from the network and runs on one thread; without a GPU kernels run in Triton's interpreter."""

import os
import signal
import socket
from pathlib import Path

import pytest
import torch
import yaml

from tests.small_study import small_study

if not torch.cuda.is_available():  # Triton reads this when it is imported, which the first test module does
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts commands in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def hermetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections to other machines."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX and not str(address[0]).startswith(("127.", "::1", "localhost")):
            raise AssertionError(f"a test wants to connect to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep parallel test processes from fighting over the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Spare Triton's interpreter what it does in vain at every step."""
    from tests._interpreter import quicken

    quicken()


@pytest.fixture
def study(tmp_path: Path) -> dict:
    """Return the content of a study of a few seconds."""
    return small_study(tmp_path / "text")


@pytest.fixture
def study_file(study: dict, tmp_path: Path) -> Path:
    """Write the study to a file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    return path
