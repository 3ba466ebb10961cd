"""Progress of long work: a bar with the time left on a terminal, else a plain line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Column
from rich.text import Text


class Advance(Protocol):
    """Reports that `n` more units are done; `note` is shown beside them until the next one."""

    def __call__(self, n: float, note: str = "") -> None:
        """Count `n` more units."""


#: Whether other processes write to the terminal of this one: bars would overwrite each other.
_SHARED: list[bool] = []


def share_terminal() -> None:
    """Write plain lines from now on, as other processes write to the same terminal."""
    _SHARED[:] = [True]


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
    """Show how far work of `total` units has come; nothing where there is none.

    Args:
        label: what is being done.
        total: the number of units in all.
        unit: what is counted.
        stream: where to write; stderr when not given.
        every: seconds between plain lines.
        clock: seconds that only grow.

    Yields:
        A function to call with the number of units done since the last call.

    >>> with progress("reading", total=3, unit="files", stream=sys.stdout, every=0) as advance:
    ...     advance(3, note="the last one")
    reading: 3 of 3 files (100 %) the last one
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
    """Plain lines for logs. What the first call reports (a resumed run jumps there) does not count for the rate."""

    def __init__(self, label: str, total: float, unit: str, stream: TextIO, every: float, clock: Callable[[], float]):
        self.label, self.total, self.unit = label, total, unit
        self.stream, self.every, self.clock = stream, every, clock
        self.done = 0.0
        self.first: tuple[float, float] | None = None
        self.note = ""
        self.now = self.written = clock()
        self.told = False

    def advance(self, n: float, note: str = "") -> None:
        self.done += n
        self.note = note
        self.now = self.clock()
        self.first = self.first or (self.now, self.done)
        if self.now - self.written >= self.every:
            self.write()

    def close(self) -> None:
        """Say how it ended, where the way there was told."""
        if self.told and self.now > self.written:
            self.write()

    def write(self) -> None:
        began, before = self.first or (self.now, self.done)
        seconds, units = self.now - began, self.done - before
        line = f"{self.label}: {self.done:,.0f} of {self.total:,.0f} {self.unit}"
        line += f" ({100 * self.done / max(self.total, 1):.0f} %)"
        if seconds > 0 and units > 0:
            left = (self.total - self.done) * seconds / units
            line += f", {units / seconds:,.3g} {self.unit}/s, {_duration(left)} left"
        print(f"{line} {self.note}".rstrip(), file=self.stream, flush=True)
        self.written, self.told = self.now, True


def _duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> _duration(4000)
    '1 h 6 min'
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class _Rate(ProgressColumn):
    def __init__(self, unit: str, table_column: Column):
        super().__init__(table_column)
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.3g} {self.unit}/s" if task.speed else "")


class _Words(ProgressColumn):
    """What gives way on a narrow terminal, so that the numbers stand in full."""

    def __init__(self, words: Callable[[Task], str]):
        super().__init__()
        self.words = words

    def render(self, task: Task) -> Text:
        return Text(self.words(task), no_wrap=True, overflow="ellipsis")


@contextmanager
def _bar(label: str, total: float, unit: str, stream: TextIO) -> Iterator[Advance]:
    columns = (
        _Words(lambda task: task.description),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),  # takes what the others leave
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _Rate(unit, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        _Words(lambda task: task.fields["note"]),
    )
    with Progress(*columns, console=Console(file=stream), expand=True) as bar:
        task = bar.add_task(label, total=total, note="")
        yield lambda n, note="": bar.update(task, advance=n, note=note)
