"""Progress of long work: a bar with rate and time left on a terminal, a plain line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

#: Seconds between two plain lines.
INTERVAL = 10.0

Advance = Callable[..., None]


@contextmanager
def progress(label: str, *, total: float, unit: str) -> Iterator[Advance]:
    """Show how far work has come, on standard error.

    Yields `advance(amount, note="")`, to be called with the amount of work done since the last call.

    Args:
        label: what is being done.
        total: the whole amount.
        unit: what the amount counts, such as "tokens".
    """
    if sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task(label, total=total, note="")
            yield lambda amount, note="": bar.update(task, advance=amount, note=note)
        return
    lines = _Lines(label, total, unit)
    yield lines.advance
    lines.write()


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=True),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )


class _Lines:
    """Plain lines for logs."""

    def __init__(self, label: str, total: float, unit: str):
        self.label, self.total, self.unit = label, total, unit
        self.done, self.note = 0.0, ""
        self.first: tuple[float, float] | None = None
        self.shown = time.monotonic()

    def advance(self, amount: float, note: str = "") -> None:
        """Count `amount` more; show a line when the last one is old enough."""
        self.done += amount
        self.note = note
        now = time.monotonic()
        if self.first is None:  # what stood before a resume says nothing about the speed
            self.first = (now, self.done)
        if now - self.shown >= INTERVAL:
            self.shown = now
            self.write()

    def write(self) -> None:
        """Print the present state."""
        began, before = self.first or (time.monotonic(), 0.0)
        seconds = time.monotonic() - began
        rate = (self.done - before) / seconds if seconds > 0 else 0.0
        left = timedelta(seconds=round((self.total - self.done) / rate)) if rate > 0 else "unknown"
        share = self.done / self.total if self.total else 1.0
        line = f"{self.label}: {share:.0%} of {self.total:,.0f} {self.unit}, {rate:,.0f} per second, {left} left"
        print(f"{line}, {self.note}" if self.note else line, file=sys.stderr, flush=True)
