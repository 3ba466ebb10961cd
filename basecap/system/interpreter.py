"""Python's search for unreachable cycles of objects."""

import contextlib
import gc
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
