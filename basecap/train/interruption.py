"""On SIGINT, SIGTERM and SIGHUP a run finishes its step, writes a checkpoint and raises `Interrupted`.

Signal handlers are global to the process, so their state is too. Outside `deferred` a signal raises at once.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from basecap.errors import Interrupted

if TYPE_CHECKING:  # imports torch, which `basecap data` need not wait for
    from basecap.train.distributed import Processes

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds after which another signal ends the process at once. A terminal or scheduler signals both a launcher and its
#: processes, and the launcher forwards the signal: an earlier one is the same request.
SECOND_SIGNAL_AFTER = 1.0
#: Seconds for which an operation may keep a signal from being handled, see `expendable`.
PATIENCE = 5.0

os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))  # the signals of a child end the child alone


class _State:
    number: int | None = None
    since = 0.0
    deferring = False
    once = False


def install(deferring: bool = False, once: bool = False) -> dict[signal.Signals, Any]:
    """Handle these signals from now on, except those that are ignored (`nohup`); return the previous handlers.

    Args:
        deferring: whether signals only set `requested`, outside `immediate`.
        once: whether all later signals are the first request again, as those of a scheduler, which can end the
            process by other means.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    _State.number, _State.deferring, _State.once = None, deferring, once
    handled = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, _handle) for number in handled}


@contextlib.contextmanager
def listening(once: bool = False) -> Iterator[None]:
    """Handle these signals within the context, and forget a request at its end; see `install`."""
    before = install(once=once)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if before:
            _State.number = None


def _handle(number: int, frame: FrameType | None) -> None:
    if _State.number is None:
        _State.number, _State.since = number, time.monotonic()
        if not _State.deferring:
            raise Interrupted(number)
    elif not _State.once and time.monotonic() - _State.since >= SECOND_SIGNAL_AFTER:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def requested() -> int | None:
    """Return the signal that asked this process to stop, None if there was none."""
    return _State.number


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let signals only set `requested`; after one the block ends with Interrupted, or with its own error."""
    before, _State.deferring = _State.deferring, True
    try:
        yield
    finally:
        _State.deferring = before
    _raise_if_requested()


@contextlib.contextmanager
def immediate() -> Iterator[None]:
    """Within `deferred`, let a signal raise Interrupted at once, also one that came before."""
    before, _State.deferring = _State.deferring, False
    try:
        _raise_if_requested()
        yield
    finally:
        _State.deferring = before


@contextlib.contextmanager
def expendable() -> Iterator[None]:
    """Let a signal raise Interrupted at once, in work that leaves nothing behind if the process ends within it.

    Python handles no signal before an operation of PyTorch returns, which may take minutes. After PATIENCE seconds of
    one SIGTERM and SIGHUP end the process, and a second SIGINT: the first may be that of a notebook, whose process
    holds more than this work.
    """
    with immediate():
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ended = threading.Event()
        numbers, written = socket.socketpair()
        written.setblocking(False)
        before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_end_by_signal, args=(numbers, ended), daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            signal.set_wakeup_fd(before)
            written.close()


def _end_by_signal(numbers: socket.socket, ended: threading.Event) -> None:
    """End this process PATIENCE seconds after a signal that asks for it, unless the work has ended by then."""
    with numbers:
        before = 0
        while received := numbers.recv(1):
            number, last = received[0], before
            before = number
            asks = number in (signal.SIGTERM, signal.SIGHUP) or number == last == signal.SIGINT
            if asks and not ended.wait(PATIENCE):
                if multiprocessing.parent_process() is None:
                    cursor = b"\n\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides it
                    os.write(2, cursor + f"{Interrupted(number)}\n".encode())
                os._exit(128 + number)


def _raise_if_requested() -> None:
    if _State.number is not None:
        raise Interrupted(_State.number)


def run_interruptible(group: "Processes", action: Callable[[], T]) -> list[T]:
    """Call `action` in every process, interruptible by a signal to any of them, and return the results by rank.

    Raises:
        Interrupted: a process received a signal; raised in all processes.
        SharedError: `action` failed in one of several processes; raised in all of them.
    """
    if group.world == 1:
        return [action()]

    def interruptible() -> tuple[bool, T | None]:
        try:
            with immediate():
                return False, action()
        except Interrupted:
            return True, None

    outcomes = group.run_on_all(interruptible)
    if any(stopped for stopped, _ in outcomes):
        raise Interrupted(requested() or signal.SIGTERM)
    return [cast(T, found) for _, found in outcomes]
