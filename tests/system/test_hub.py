"""The hub: one connection is tried, and what is stored here is used without it."""

import socket
import time

import pytest
from huggingface_hub import constants

from basecap.errors import DataError
from basecap.system import hub


@pytest.fixture
def connected(monkeypatch):
    """Let no connection be made, and return the addresses that are asked for."""
    asked = []

    def refuse(address, timeout):
        asked.append(address)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(hub, "getproxies", dict)
    hub.unreachable.cache_clear()
    yield asked
    hub.unreachable.cache_clear()


def test_a_process_asks_once_for_a_hub_that_is_out_of_reach(connected):
    sentence = (
        r"^dataset 'a' needs the Hugging Face hub, which is out of reach "
        r"\(no connection to huggingface.co: Name or service not known\); check the network\.$"
    )
    for _ in range(2):
        with pytest.raises(DataError, match=sentence):
            hub.refuse_unreachable("dataset 'a'", "check the network")
    assert connected == [("huggingface.co", 443)]
    before = constants.HF_HUB_OFFLINE
    with hub.without_retries():
        assert constants.HF_HUB_OFFLINE is True
    assert constants.HF_HUB_OFFLINE is before


def test_a_proxy_is_asked_in_the_place_of_the_hub(connected, monkeypatch):
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy.local:3128"})
    assert "proxy.local" in hub.unreachable()
    assert connected == [("proxy.local", 3128)]


def test_offline_mode_asks_for_nothing_and_a_silent_network_ends_in_time(connected, monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE", 0.05)
    monkeypatch.setattr(hub, "_connect", lambda host, port: time.sleep(0.5))
    assert hub.unreachable() == "no connection to huggingface.co within 0.05 s"
    hub.unreachable.cache_clear()
    monkeypatch.setattr(hub, "_connect", lambda host, port: None)
    assert hub.unreachable() is None
    with hub.without_retries():
        hub.refuse_unreachable("dataset 'a'", "check the network")
    hub.unreachable.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.unreachable() == "HF_HUB_OFFLINE is set" and connected == []
