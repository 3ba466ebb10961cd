"""A directory has one holder at a time, and a holder that is killed holds nothing."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from basecap.errors import ConfigError, DataError
from basecap.system.locks import first_alone, is_locked, locked, remove_ended

HOLDER = """
import sys, time
from pathlib import Path
from basecap.system import locks
if sys.argv[2:]:
    locks._has_flock = lambda directory: False
    locks.LEASE = 0.6
with locks.locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_held_lock_is_refused_with_the_given_sentence(tmp_path):
    place = tmp_path / "made" / "for it"
    with locked(place, "busy; wait."):
        assert is_locked(place)
        with pytest.raises(ConfigError, match=r"^busy; wait\.$"), locked(place, "busy; wait."):
            pass
        assert is_locked(place)  # the refused one took nothing away
    assert not is_locked(place)
    with locked(place, "busy; wait."):
        assert is_locked(place)


def test_a_lock_is_no_link_to_another_file(tmp_path):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "kept")
    with pytest.raises(DataError, match="lock is a link, through which nothing is written"), locked(tmp_path):
        pass
    assert (tmp_path / "kept").read_text() == "kept"


def test_an_error_inside_releases_the_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert not is_locked(tmp_path)


def test_asking_creates_no_file(tmp_path):
    assert not is_locked(tmp_path / "nothing") and not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_a_sentence_the_lock_is_waited_for(tmp_path):
    order: list[str] = []

    def wait() -> None:
        with locked(tmp_path):
            order.append("second")

    waiting = threading.Thread(target=wait)
    with locked(tmp_path):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        order.append("first")
    waiting.join(60)
    assert order == ["first", "second"]


def test_two_paths_to_one_directory_are_one_lock(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with locked(tmp_path / "link"):
        assert is_locked(tmp_path / "real")


def test_a_killed_holder_holds_nothing(tmp_path: Path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert is_locked(tmp_path)
        with pytest.raises(ConfigError, match="busy"), locked(tmp_path, "busy"):
            pass
        holder.kill()
        with locked(tmp_path):  # waits until the process has ended
            assert is_locked(tmp_path)


def test_the_first_is_alone_and_the_others_follow_together(tmp_path):
    inside, seen, together = [], [], threading.Barrier(3, timeout=60)

    def work(number: int) -> None:
        with first_alone(tmp_path, "block", lambda: False):
            inside.append(number)
            seen.append(len(inside))
            if len(seen) > 1:
                together.wait()  # passes only if all three are inside
            else:
                time.sleep(0.3)
            inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4 and seen[0] == 1 and not together.broken


def test_after_a_failure_the_next_one_is_first(tmp_path):
    with pytest.raises(RuntimeError), first_alone(tmp_path, "block", lambda: False):
        raise RuntimeError
    with first_alone(tmp_path, "block", lambda: False):
        stopped = [False, True]
        with first_alone(tmp_path, "block", lambda: stopped.pop(0)):  # it would wait for the one above
            pass
        assert not stopped
    with first_alone(tmp_path, "block", lambda: pytest.fail("waits")):
        pass


@pytest.fixture
def without_flock(monkeypatch):
    """A file system without flock, on which a lease lasts 0.6 seconds."""
    monkeypatch.setattr("basecap.system.locks._has_flock", lambda directory: False)
    monkeypatch.setattr("basecap.system.locks.LEASE", 0.6)
    return monkeypatch


def lease_of_another_host(directory: Path) -> Path:
    path = directory / "lock.lease"
    path.write_text("filelock/2\npid=1\nhost=elsewhere\nmode=lease\ntoken=0\nduration=0.6\n")
    return path


def test_without_flock_a_lock_is_a_file_with_host_and_process(tmp_path, without_flock):
    with locked(tmp_path, "busy; wait."):
        assert is_locked(tmp_path) and f"pid={os.getpid()}\nhost={socket.gethostname()}" in (
            (tmp_path / "lock.lease").read_text()
        )
        with pytest.raises(ConfigError, match=r"^busy; wait\.$"), locked(tmp_path, "busy; wait."):
            pass
    assert not is_locked(tmp_path) and list(tmp_path.iterdir()) == []
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), "lease"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        holder.kill()
        holder.wait()
        with locked(tmp_path, "busy"):  # on the same host a process that has ended holds nothing
            assert is_locked(tmp_path)


def test_the_heartbeat_of_another_host_decides_whatever_its_clock_says(tmp_path, without_flock):
    lease, since = lease_of_another_host(tmp_path), time.monotonic()
    hour = 3600 * 10**9
    beats = iter(time.time_ns() + sign * hour + n for n in range(8) for sign in (1, -1))
    while time.monotonic() - since < 1.2:
        os.utime(lease, ns=(next(beats),) * 2)
        assert is_locked(tmp_path)
        with pytest.raises(ConfigError, match="busy"), locked(tmp_path, "busy"):
            pass
        time.sleep(0.15)
    silent = time.monotonic()
    with locked(tmp_path):  # waits until the heartbeat has not changed for as long as a lease lasts
        assert 0.4 < time.monotonic() - silent < 30
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("flock", [True, False])
def test_who_does_not_wait_for_the_lease_of_a_killed_process_gets_it_once_it_is_silent(flock, tmp_path, without_flock):
    if flock:
        without_flock.undo()
        without_flock.setattr("basecap.system.locks.LEASE", 0.6)
        (tmp_path / "lock").write_text("1\n")  # the last holder with flock had another lease
    lease_of_another_host(tmp_path)
    since, looks = time.monotonic(), 0
    while True:
        with suppress(ConfigError), locked(tmp_path, "busy"):
            break
        while is_locked(tmp_path):
            time.sleep(0.05)
            looks += 1
        assert time.monotonic() - since < 30
    assert time.monotonic() - since > 0.4 and looks and not is_locked(tmp_path)


@pytest.mark.parametrize("first", [True, False])
def test_hosts_with_and_without_flock_see_each_others_locks(first, tmp_path, monkeypatch):
    def host(has: bool) -> None:
        monkeypatch.setattr("basecap.system.locks._has_flock", lambda directory: has)
        monkeypatch.setattr(fcntl, "flock", flock if has else refuse)

    flock = fcntl.flock
    host(first)
    with locked(tmp_path) as held:
        host(not first)
        assert is_locked(tmp_path)
        with pytest.raises(ConfigError, match="busy"), locked(tmp_path, "busy"):
            pass
        assert not held.lost
        host(first)
    host(not first)
    assert not is_locked(tmp_path)
    with locked(tmp_path, "busy") as held:
        lease_of_another_host(tmp_path)
        (tmp_path / "lock.lease").rename(tmp_path / "aside")
        assert held.lost


def test_a_holder_knows_that_a_host_whose_flock_is_its_own_took_its_lock(tmp_path, monkeypatch):
    with locked(tmp_path) as held:
        monkeypatch.setattr(fcntl, "flock", lambda file, how: None)  # as with the option localflock of Lustre
        with locked(tmp_path, "busy"):
            assert held.lost


def test_with_flock_the_lease_of_a_killed_holder_counts_for_nothing(tmp_path):
    lease_of_another_host(tmp_path)
    assert is_locked(tmp_path)
    (tmp_path / "lock").write_text("0\n")  # as its holder does, which had locked this file
    assert not is_locked(tmp_path)
    with locked(tmp_path, "busy"):
        assert is_locked(tmp_path)


def test_whether_flock_works_is_found_without_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["lock.lease"]
    assert list(tmp_path.iterdir()) == []


def refuse(file, how):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_lease_that_was_taken_is_lost(tmp_path, without_flock):
    with locked(tmp_path) as held:
        assert not held.lost
        (tmp_path / "lock.lease").rename(tmp_path / "aside")
        assert held.lost
        lease_of_another_host(tmp_path)
        assert held.lost


def test_locks_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "command-1").touch()
    with locked(tmp_path, name="command-2", keep=False):
        remove_ended(tmp_path, "command-")
        assert {path.name for path in tmp_path.iterdir()} == {"command-2", "command-2.lease"}
        assert is_locked(tmp_path, "command-2") and not is_locked(tmp_path, "command-1")
    assert list(tmp_path.iterdir()) == []
