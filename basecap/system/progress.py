"""Progress of long work: a bar with the remaining time on a terminal, otherwise a line every few seconds."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from basecap.system.streams import protect_streams


class Advance(Protocol):
    """Reports `n` more finished units; `note` is shown beside the count until the next call."""

    def __call__(self, n: float, note: str = "") -> None:
        """Add `n` finished units."""


class Pauses:
    """Work of another kind between the units of a progress, such as evaluations between steps of training.

    Its time is no part of the rate, and what is still to come is part of the time left.
    """

    def __init__(self, total: int = 0, clock: Callable[[], float] = time.monotonic):
        """Take how many pauses there will be."""
        self._left, self._clock = total, clock
        self._since: float | None = None
        self._before = 0.0
        self._counted: list[float] = []

    @contextmanager
    def pause(self, *, counted: bool = True) -> Iterator[None]:
        """Pause; one that is not `counted` is none of the total, and says nothing of how long those take."""
        self._since = self._clock()
        try:
            yield
        finally:
            took = self._clock() - self._since
            self._since, self._before = None, self._before + took
            if counted:
                self._counted.append(took)
                self._left -= 1

    @property
    def running(self) -> bool:
        """Whether there is a pause now."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """The time of all pauses so far."""
        return self._before + (0.0 if self._since is None else self._clock() - self._since)

    @property
    def left(self) -> float | None:
        """The seconds of the pauses to come, at the pace of those so far; None while that is unknown."""
        if self._left <= 0:
            return 0.0
        if not self._counted:
            return None
        each = sum(self._counted) / len(self._counted)
        begun = 0.0 if self._since is None else min(each, self._clock() - self._since)
        return self._left * each - begun


class _Pace:
    """Rate and time left. The first call does not count: a resumed run jumps to its checkpoint there.

    The rate is that of the later half of the work, as first steps compile and others measure which kernels are fast.
    """

    def __init__(self, total: float, pauses: Pauses, clock: Callable[[], float]):
        self.total, self.pauses, self.clock = total, pauses, clock
        self.done = 0.0
        #: Seconds of work and units done, from the middle of the work on.
        self.marks: deque[tuple[float, float]] = deque()
        self.begun = 0.0

    def advance(self, n: float) -> None:
        self.done += n
        working = self.clock() - self.pauses.seconds
        if not self.marks:
            self.begun = working
        elapsed = working - self.begun
        if not self.marks or working - self.marks[-1][0] >= elapsed / 100:  # few marks for any number of steps
            self.marks.append((working, self.done))
        while len(self.marks) > 2 and self.marks[1][0] <= self.begun + elapsed / 2:
            self.marks.popleft()

    @property
    def rate(self) -> float | None:
        """Units per second of work, without pauses; None while unknown."""
        if not self.marks:
            return None
        (since, before), (now, done) = self.marks[0], self.marks[-1]
        units, seconds = done - before, now - since
        return units / seconds if seconds > 0 and units > 0 else None

    @property
    def left(self) -> str:
        """The time left in words, "" while unknown."""
        if self.rate is None:
            return ""
        work, pauses = (self.total - self.done) / self.rate, self.pauses.left
        if not work and not pauses:
            return ""  # done, or the last pause takes longer than those before
        return f"more than {duration(work)} left" if pauses is None else f"{duration(work + pauses)} left"


#: In seconds.
DAY, YEAR = 86_400, 365 * 86_400
#: Not empty when other processes write to the same terminal, where bars would overwrite each other.
_SHARED: list[bool] = []


def share_terminal() -> None:
    """Print lines instead of bars from now on, because other processes write to the same terminal."""
    _SHARED[:] = [True]
    protect_streams()


def write_line(line: str, stream: TextIO | None = None) -> None:
    """Write a line to `stream`, by default stderr, in one piece; the end of `print` is a second write of its own."""
    stream = stream or sys.stderr
    stream.write(f"{line}\n")
    stream.flush()


@contextmanager
def progress(
    label: str,
    total: float,
    unit: str = "tokens",
    *,
    stream: TextIO | None = None,
    every: float = 10.0,
    pauses: Pauses | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Show the progress of work of `total` units; shows nothing when `total` is 0.

    Args:
        label: name of the work.
        total: number of units.
        unit: name of a unit, in the plural.
        stream: where to write; stderr by default.
        every: seconds between lines when there is no bar.
        pauses: work of another kind that is done in between.
        clock: returns monotonic seconds.

    Yields:
        A function to call with the number of units done since the last call.

    >>> with progress("reading", total=3, unit="files", stream=sys.stdout, every=0) as advance:
    ...     advance(3, note="the last one")
    reading: 3 of 3 files (100 %); the last one
    """
    stream = stream or sys.stderr
    pace = _Pace(total, pauses or Pauses(), clock)
    if not total:
        yield lambda n, note="": None
    elif stream.isatty() and not _SHARED:
        with _bar(label, pace, unit, stream) as advance:
            yield advance
    else:
        lines = _Lines(label, pace, unit, stream, every)
        with _beating(lines.beat, every):
            yield lines.advance
        lines.close()


@contextmanager
def phase(label: str, *, stream: TextIO | None = None, every: float = 10.0) -> Iterator[None]:
    """Show for how long work of unknown length runs: a spinner on a terminal, otherwise a line every few seconds.

    Args:
        label: name of the work.
        stream: where to write; stderr by default.
        every: seconds between lines when there is no spinner.
    """
    stream, began = stream or sys.stderr, time.monotonic()

    def elapsed() -> float:
        return time.monotonic() - began

    if stream.isatty() and not _SHARED:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=Console(file=stream)) as bar:
            bar.add_task(label, total=None)
            yield
        return
    with _beating(lambda: write_line(f"{label}: {duration(elapsed())} so far", stream), every):
        yield
    if elapsed() >= every:
        write_line(f"{label}: done in {duration(elapsed())}", stream)


@contextmanager
def _beating(beat: Callable[[], None], every: float) -> Iterator[None]:
    """Call `beat` every few seconds, from another thread, as one call of a library may take minutes."""
    ended = Event()

    def run() -> None:
        while not ended.wait(every or 10.0):
            beat()

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Lines:
    """Lines for logs."""

    def __init__(self, label: str, pace: _Pace, unit: str, stream: TextIO, every: float):
        self.label, self.pace, self.unit = label, pace, unit
        self.stream, self.every = stream, every
        self.note = ""
        self.now = self.written = pace.clock()
        self.has_written = False

    def advance(self, n: float, note: str = "") -> None:
        self.pace.advance(n)
        self.note = note
        self.now = self.pace.clock()
        if self.now - self.written >= self.every:
            self.write()

    def beat(self) -> None:
        """Write a line where there was none for a while, as in a step that compiles or in a long evaluation."""
        self.now = self.pace.clock()
        if self.now - self.written >= self.every:
            self.write()

    def close(self) -> None:
        """Write a last line, unless the work was too short for any line."""
        if self.has_written and self.now > self.written:
            self.write()

    def write(self) -> None:
        pace = self.pace
        line = f"{self.label}: {pace.done:,.0f} of {pace.total:,.0f} {self.unit}"
        line += f" ({100 * pace.done / max(pace.total, 1):.0f} %)"
        line = ", ".join(filter(None, (line, _rate(pace.rate, self.unit), pace.left)))
        write_line(f"{line}; {self.note}" if self.note else line, self.stream)
        self.written, self.has_written = self.now, True


def duration(seconds: float) -> str:
    """Format a duration in its two largest units, days and years alone.

    >>> duration(0.2), duration(120), duration(4000), duration(3e6), duration(1e9)
    ('under 1 s', '2 min', '1 h 6 min', '35 days', '32 years')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole or not seconds else "under 1 s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s".removesuffix(" 0 s")
    if whole < 2 * DAY:
        return f"{whole // 3600} h {whole % 3600 // 60} min".removesuffix(" 0 min")
    return f"{whole / DAY:,.0f} days" if whole < 2 * YEAR else f"{whole / YEAR:,.0f} years"


def _rate(rate: float | None, unit: str) -> str:
    """Return a rate with three digits, or as a whole number; of few units a second the time left says more.

    >>> _rate(1.4286, "files"), _rate(1528.4, "tokens"), _rate(0.06089, "runs")
    ('1.43 files/s', '1,528 tokens/s', '')
    """
    if rate is None or rate < 1:
        return ""
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"


class _Label(ProgressColumn):
    """Text, shortened on a narrow terminal unless its column may not wrap, so that the numbers stay complete."""

    def __init__(self, text_of: Callable[[Task], str], table_column: Column | None = None):
        super().__init__(table_column)
        self.text_of = text_of

    def render(self, task: Task) -> Text:
        return Text(self.text_of(task), no_wrap=True, overflow="ellipsis")


@contextmanager
def _bar(label: str, pace: _Pace, unit: str, stream: TextIO) -> Iterator[Advance]:
    def advance(n: float, note: str = "") -> None:
        pace.advance(n)
        bar.update(task, advance=n, note=note)

    columns = (
        _Label(lambda task: task.description),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),  # fills the remaining width
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _Label(lambda task: _rate(pace.rate, unit), table_column=Column(no_wrap=True)),
        _Label(lambda task: pace.left, table_column=Column(no_wrap=True)),
        _Label(lambda task: task.fields["note"]),
    )
    with Progress(*columns, console=Console(file=stream), expand=True) as bar:
        task = bar.add_task(label, total=pace.total, note="")
        yield advance
