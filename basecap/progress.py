"""Progress of long work: a bar with the remaining time on a terminal, otherwise a line every few seconds."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Column
from rich.text import Text


class Advance(Protocol):
    """Reports `n` more finished units; `note` is shown beside the count until the next call."""

    def __call__(self, n: float, note: str = "") -> None:
        """Add `n` finished units."""


#: In seconds.
DAY, YEAR = 86_400, 365 * 86_400
#: Not empty when other processes write to the same terminal, where bars would overwrite each other.
_SHARED: list[bool] = []


def share_terminal() -> None:
    """Print lines instead of bars from now on, because other processes write to the same terminal."""
    _SHARED[:] = [True]
    protect_streams()


def protect_streams() -> None:
    """From now on lose messages on stderr that cannot be written, and output where stdout is closed.

    Otherwise a full disk under a log, or a terminal that is gone, would end a run.
    """
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    elif not isinstance(sys.stderr, _LossyStream):
        sys.stderr = cast(TextIO, _LossyStream(sys.stderr))


def _nowhere() -> TextIO:
    """Return a stream to /dev/null, also for workers.

    It takes the lowest free descriptor, that of the closed stream: a file there would receive messages of C libraries.
    """
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.set_inheritable(descriptor, True)
    return os.fdopen(descriptor, "w")


class _LossyStream:
    """A stream that loses what cannot be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Show the progress of work of `total` units; shows nothing when `total` is 0.

    Args:
        label: name of the work.
        total: number of units.
        unit: name of a unit, in the plural.
        stream: where to write; stderr by default.
        every: seconds between lines when there is no bar.
        clock: returns monotonic seconds.

    Yields:
        A function to call with the number of units done since the last call.

    >>> with progress("reading", total=3, unit="files", stream=sys.stdout, every=0) as advance:
    ...     advance(3, note="the last one")
    reading: 3 of 3 files (100 %); the last one
    """
    stream = stream or sys.stderr
    if not total:
        yield lambda n, note="": None
    elif stream.isatty() and not _SHARED:
        with _bar(label, total, unit, stream) as advance:
            yield advance
    else:
        lines = _Lines(label, total, unit, stream, every, clock)
        yield lines.advance
        lines.close()


class _Lines:
    """Lines for logs. The first call does not count for the rate: a resumed run jumps to its checkpoint there."""

    def __init__(self, label: str, total: float, unit: str, stream: TextIO, every: float, clock: Callable[[], float]):
        self.label, self.total, self.unit = label, total, unit
        self.stream, self.every, self.clock = stream, every, clock
        self.done = 0.0
        self.first: tuple[float, float] | None = None
        self.note = ""
        self.now = self.written = clock()
        self.has_written = False

    def advance(self, n: float, note: str = "") -> None:
        self.done += n
        self.note = note
        self.now = self.clock()
        self.first = self.first or (self.now, self.done)
        if self.now - self.written >= self.every:
            self.write()

    def close(self) -> None:
        """Write a last line, unless the work was too short for any line."""
        if self.has_written and self.now > self.written:
            self.write()

    def write(self) -> None:
        start, before = self.first or (self.now, self.done)
        seconds, units = self.now - start, self.done - before
        line = f"{self.label}: {self.done:,.0f} of {self.total:,.0f} {self.unit}"
        line += f" ({100 * self.done / max(self.total, 1):.0f} %)"
        if seconds > 0 and units > 0:
            left = (self.total - self.done) * seconds / units
            line += f", {_number(units / seconds)} {self.unit}/s, {duration(left)} left"
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


def _number(rate: float) -> str:
    """Format a rate with three digits, or as a whole number.

    >>> _number(0.06089), _number(1528.4)
    ('0.0609', '1,528')
    """
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


class _Rate(ProgressColumn):
    def __init__(self, unit: str, table_column: Column):
        super().__init__(table_column)
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{_number(task.speed)} {self.unit}/s" if task.speed else "")


class _Label(ProgressColumn):
    """Text that is shortened on a narrow terminal, so that the numbers stay complete."""

    def __init__(self, text_of: Callable[[Task], str]):
        super().__init__()
        self.text_of = text_of

    def render(self, task: Task) -> Text:
        return Text(self.text_of(task), no_wrap=True, overflow="ellipsis")


@contextmanager
def _bar(label: str, total: float, unit: str, stream: TextIO) -> Iterator[Advance]:
    columns = (
        _Label(lambda task: task.description),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),  # fills the remaining width
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _Rate(unit, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        _Label(lambda task: task.fields["note"]),
    )
    with Progress(*columns, console=Console(file=stream), expand=True) as bar:
        task = bar.add_task(label, total=total, note="")
        yield lambda n, note="": bar.update(task, advance=n, note=note)
