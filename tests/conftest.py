"""Every test is cut off from the network and runs on one thread."""

import socket

import pytest
import torch


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
