"""The process that Python runs in: its search for unreachable cycles of objects, and its threads of BLAS."""

import contextlib
import gc
import os
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch the search for cycles off for a block that makes none, and many objects to search again and again.

    Loading modules is such work, and so is a report with its 100,000 rows.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def loading_lightly() -> Iterator[None]:
    """Load the modules of a command that computes for a second: without search for cycles, OpenBLAS with one thread.

    Its other threads would spin for longer than they save. Where numpy is loaded already, their number stays.
    """
    os.putenv("OPENBLAS_NUM_THREADS", "1")
    with uncollected():
        yield
