"""Standard output and standard error, which may be closed or full."""

import contextlib
import os
import sys
from typing import Any, TextIO, cast


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
