"""Progress: plain lines where nobody watches, a bar on a terminal."""

import contextlib
import io
import os
import sys
import time
from pathlib import Path

import pytest

from basecap.system.progress import Pauses, phase, progress, share_terminal, write_line
from basecap.system.streams import protect_streams


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pieces(io.StringIO):
    def write(self, text: str) -> int:
        self.pieces = [*getattr(self, "pieces", []), text]
        return super().write(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_written_in_one_piece():
    stream = Pieces()
    write_line("run: stopped", stream)
    assert stream.pieces == ["run: stopped\n"]


def test_plain_lines_come_at_intervals_with_rate_and_time_left():
    stream, clock = io.StringIO(), Clock()
    with progress("run [a]", total=1000, unit="tokens", stream=stream, every=10, clock=clock) as advance:
        advance(400)  # a resumed run
        for _ in range(60):
            clock.now += 0.5
            advance(5, note="loss 3.1")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run [a]: 500 of 1,000 tokens (50 %), 10 tokens/s, 50 s left; loss 3.1"
    assert [line.partition(" of")[0] for line in lines] == ["run [a]: 500", "run [a]: 600", "run [a]: 700"]


def test_pauses_are_no_part_of_the_rate_and_those_to_come_of_the_time_left():
    stream, clock = io.StringIO(), Clock()
    pauses = Pauses(4, clock)
    with progress("run", total=400, stream=stream, every=9, pauses=pauses, clock=clock) as advance:
        advance(0)
        with pauses.pause(counted=False):  # a resumed run
            clock.now += 3
        for part in range(4):
            clock.now += 10
            advance(100, note=f"part {part}")
            with pauses.pause():
                clock.now += 20
                advance(0, note="evaluating")
    lines = [line.removeprefix("run: ").replace(" of 400 tokens", "") for line in stream.getvalue().splitlines()]
    assert lines[:4] == [
        "100 (25 %), 10 tokens/s, more than 30 s left; part 0",
        "100 (25 %), 10 tokens/s, more than 30 s left; evaluating",
        "200 (50 %), 10 tokens/s, 1 min 20 s left; part 1",
        "200 (50 %), 10 tokens/s, 1 min left; evaluating",
    ]
    assert lines[-2:] == ["400 (100 %), 10 tokens/s, 20 s left; part 3", "400 (100 %), 10 tokens/s; evaluating"]


def test_work_that_had_lines_ends_with_a_last_line():
    stream, clock = io.StringIO(), Clock()
    with progress("run", total=30, unit="files", stream=stream, clock=clock) as advance:
        for _ in range(3):
            clock.now += 7
            advance(10)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and lines[1] == "run: 30 of 30 files (100 %), 1.43 files/s"


def test_a_long_step_writes_lines_with_its_note(monkeypatch):
    stream = io.StringIO()
    with progress("run", total=4, stream=stream, every=0.1) as advance:
        advance(0, note="compiling")
        time.sleep(0.35)
    assert stream.getvalue().splitlines()[0] == "run: 0 of 4 tokens (0 %); compiling"


def test_work_of_unknown_length_says_how_long_it_runs():
    stream, terminal = io.StringIO(), Terminal()
    with phase("merging", stream=stream):
        pass
    assert stream.getvalue() == ""
    with phase("merging", stream=stream, every=0.1):
        time.sleep(0.25)
    assert stream.getvalue().splitlines()[:: len(stream.getvalue().splitlines()) - 1] == [
        "merging: under 1 s so far",
        "merging: done in under 1 s",
    ]
    with phase("[merging]", stream=terminal):
        pass
    assert "[merging]" in terminal.getvalue()


def test_quick_work_writes_nothing():
    stream = io.StringIO()
    with progress("quick", total=2, stream=stream) as advance:
        advance(1)
        advance(1)
    assert stream.getvalue() == ""


def test_no_work_shows_nothing():
    stream = Terminal()
    with progress("nothing", total=0, stream=stream) as advance:
        advance(0, note="at all")
    assert stream.getvalue() == ""


def test_a_terminal_that_processes_share_gets_lines(monkeypatch):
    """Bars of several processes would overwrite each other."""
    monkeypatch.setattr("basecap.system.progress._SHARED", [])
    monkeypatch.setattr("sys.stderr", sys.stderr)  # restored afterwards
    share_terminal()
    stream = Terminal()
    with progress("run", total=10, unit="files", stream=stream, every=0) as advance:
        advance(10)
    assert stream.getvalue() == "run: 10 of 10 files (100 %)\n"


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    with progress("run [a]", total=10, unit="tokens", stream=stream) as advance:
        advance(10, note="loss [3.1]")
    shown = stream.getvalue()
    assert "run [a]" in shown and "10/10" in shown and "loss [3.1]" in shown


def test_a_bar_keeps_its_numbers_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with progress("transformer++ without rotary positions (seed 0)", total=60_000_000, stream=stream) as advance:
        advance(30_081_024, note="a note far longer than what is left of the line")
    shown = stream.getvalue()
    assert "30081024/60000000" in shown and "transf" in shown
    assert shown.count("\n") == 1


def test_work_outlives_a_log_on_a_full_disk(monkeypatch):
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        with pytest.raises(OSError, match="No space"):
            write_line("lost")
        protect_streams()
        write_line("lost")
        with progress("run", total=2, every=0) as advance:
            advance(1)
            advance(1)
        assert sys.stderr.encoding == full.encoding and not sys.stderr.isatty()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_closed_streams_get_descriptors_of_their_own(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    protect_streams()
    write_line("lost")
    for stream in (sys.stdout, sys.stderr):
        assert os.get_inheritable(stream.fileno())
        stream.close()


def test_a_slow_start_is_no_part_of_the_rate_for_long():
    stream, clock = io.StringIO(), Clock()
    with progress("run", total=1000, unit="steps", stream=stream, clock=clock) as advance:
        advance(0)
        for step in range(121):
            clock.now += 1 if step else 100
            advance(1)
    lines = stream.getvalue().splitlines()
    assert "steps (0 %), 27 h 45 min left" in lines[0]
    assert lines[-1] == "run: 121 of 1,000 steps (12 %), 1 steps/s, 14 min 39 s left"
