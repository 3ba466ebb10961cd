"""A directory has one holder at a time, and a holder that is killed holds nothing."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from basecap.errors import ConfigError, DataError
from basecap.system.locks import first_alone, is_locked, locked

HOLDER = """
import sys, time
from pathlib import Path
from basecap.system.locks import locked
with locked(Path(sys.argv[1])):
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
