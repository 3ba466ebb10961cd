"""SIGINT and SIGTERM ask a run to stop: it finishes its step, writes a checkpoint and ends with `Interrupted`.

Handlers belong to the whole process, so their state does too. Outside `deferred` a signal raises at once.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from basecap.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds after a signal from which on another one ends the process at once. Launchers pass on to their processes what
#: the terminal or the scheduler has sent to these as well: sooner it is the same request.
AGAIN = 1.0


class _State:
    number: int | None = None
    since = 0.0
    deferring = False


def install(deferring: bool = False) -> dict[signal.Signals, Any]:
    """Handle both signals from now on, except where they are ignored (`nohup`); return the handlers before.

    Args:
        deferring: let them set `requested` only, until told otherwise.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    _State.number, _State.deferring = None, deferring
    heeded = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, _handle) for number in heeded}


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Handle both signals for a while; see `install`."""
    before = install()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    if _State.number is None:
        _State.number, _State.since = number, time.monotonic()
        if not _State.deferring:
            raise Interrupted(number)
    elif time.monotonic() - _State.since >= AGAIN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def requested() -> int | None:
    """Return the signal that asked this process to stop, None when none has."""
    return _State.number


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let signals set `requested` only; raises Interrupted at the end when one has come and nothing else was raised."""
    before, _State.deferring = _State.deferring, True
    try:
        yield
    finally:
        _State.deferring = before
    _raise_if_requested()


@contextlib.contextmanager
def immediate() -> Iterator[None]:
    """Let a signal raise Interrupted at once within `deferred`, also one that has come before."""
    before, _State.deferring = _State.deferring, False
    try:
        _raise_if_requested()
        yield
    finally:
        _State.deferring = before


def _raise_if_requested() -> None:
    if _State.number is not None:
        raise Interrupted(_State.number)
