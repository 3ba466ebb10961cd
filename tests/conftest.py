"""Every test is cut off from the network and runs on one thread; without a GPU kernels run in Triton's interpreter."""

import gc
import importlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import yaml

from tests.small_study import small_study

# A launcher such as nohup ignores it, and so would the commands that the tests interrupt.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

#: How addresses and names of this machine begin.
LOCAL = ("127.", "::1", "localhost")

os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "false"  # else datasets reports to its hub that it read a local file

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts commands in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Import what all tests need, which the process that only hands them out to others does not: it takes seconds."""
    gc.disable()  # while tests are collected, see below
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():  # Triton reads this when it is imported, which the first test module does
        os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("tests._architectures")  # before a test registers an architecture


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what is imported, which it would search again and again."""
    importlib.import_module("torch._dynamo")  # which tests of compiled code import in the end
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20)  # by default it would search ten times as often, and find as little
    gc.enable()


@pytest.fixture(autouse=True)
def hermetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Refuse other machines and their names; a test that asks for one fails, even if the library asked in a `try`."""
    asked: list[object] = []
    connect, connect_ex, look_up = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def refuse(host: object) -> None:
        if host and not str(host).startswith(LOCAL):
            asked.append(host)
            raise ConnectionRefusedError(f"a test wants to connect to {host}")

    def guarded(method: Callable) -> Callable:
        def call(self: socket.socket, address: tuple) -> object:
            if self.family != socket.AF_UNIX:
                refuse(address[0])
            return method(self, address)

        return call

    def guarded_look_up(host: object, *arguments: object, **options: object) -> list:
        refuse(host.decode() if isinstance(host, bytes) else host)
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket.socket, "connect", guarded(connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded(connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)
    yield asked
    assert not asked, f"a test wants to connect to {asked}"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep parallel test processes from fighting over the cores."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Make Triton's interpreter faster: it repeats unnecessary work at every step."""
    from tests._interpreter import quicken

    quicken()


@pytest.fixture(autouse=True)
def no_numba() -> Iterator[None]:
    """Compile no kernels for CPUs, which takes each process seconds; `ops/` and `run/` have them."""
    from basecap.ops import without_numba

    with without_numba():
        yield


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be forks of a process that has imported everything, which takes each of them seconds."""
    from tests.forks import FORKS

    forkserver.ensure_running()  # a pool would start it while SIGINT is blocked, and so would be all later forks
    monkeypatch.setattr("basecap.system.processes.START_METHOD", FORKS.get_start_method())


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


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Register an architecture of these mixers for one test; return its name."""

    from basecap.mixers import ARCHITECTURES, Architecture, LayerChoice  # here, as this may import Triton

    def add(*mixers: type) -> str:
        layers = tuple(LayerChoice(mixer=mixer) for mixer in mixers)
        entry = Architecture(name="broken", layers=layers, backbone="gpt", summary="", paper="")
        ARCHITECTURES.names()  # else files imported later would go with the test
        monkeypatch.setitem(ARCHITECTURES._entries, "broken", entry)
        return "broken"

    return add
