"""What is asked of the machine."""

import ctypes
import platform

import pytest

from basecap import environment


class Libc:
    """Remembers what it was told."""

    def __init__(self):
        self.told: list[tuple[int, int]] = []

    def mallopt(self, name: int, value: int) -> int:
        self.told.append((name, value))
        return 1


@pytest.mark.parametrize(("libc", "told"), [("glibc", [(-1, 2**31 - 1), (-3, 2**25)]), ("musl", []), ("", [])], ids=str)
def test_only_glibc_is_told_to_keep_memory(libc: str, told: list, monkeypatch: pytest.MonkeyPatch):
    fake = Libc()
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    assert environment.choose_device("cpu").type == "cpu"
    assert fake.told == told
