"""A sound mixer to break, and the registry that forgets it."""

from collections.abc import Callable

import pytest

from basecap.mixers import ARCHITECTURES, Architecture, LayerChoice, Mixer


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Register an architecture of these mixers for one test; return its name."""

    def add(*mixers: type[Mixer]) -> str:
        layers = tuple(LayerChoice(mixer=mixer) for mixer in mixers)
        entry = Architecture(name="broken", layers=layers, backbone="gpt", summary="", paper="")
        ARCHITECTURES.names()  # else files imported later would go with the test
        monkeypatch.setitem(ARCHITECTURES._entries, "broken", entry)
        return "broken"

    return add
