"""No test reaches another machine, and a warning is an error."""

import socket
import urllib.request
import warnings

import pytest


def test_other_machines_are_refused_by_address_and_by_name(hermetic: list[object]):
    with pytest.raises(ConnectionRefusedError, match=r"192\.0\.2\.1"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(OSError, match=r"example\.invalid"):
        urllib.request.urlopen("http://example.invalid/", timeout=1)
    with socket.socket() as plain, pytest.raises(ConnectionRefusedError):
        plain.connect_ex(("192.0.2.1", 80))
    assert hermetic == ["192.0.2.1", "example.invalid", "192.0.2.1"]
    hermetic.clear()


def test_this_machine_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        assert one.getpeername() == server.getsockname()


@pytest.mark.parametrize("kind", [UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning, ResourceWarning])
def test_a_warning_is_an_error(kind: type[Warning]):
    with pytest.raises(kind, match="anything"):
        warnings.warn("anything", kind, stacklevel=1)
