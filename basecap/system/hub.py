"""The Hugging Face hub: one connection shows whether it is in reach, where its libraries would retry for a minute."""

import contextlib
import socket
import sys
from collections.abc import Iterator
from functools import cache
from threading import Thread
from unittest.mock import patch
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from basecap.errors import DataError

#: Seconds that the connection may take, names of hosts included.
PATIENCE = 5.0


@cache
def unreachable() -> str | None:
    """Return why the hub, or the proxy on the way to it, is out of reach; None when it is not.

    Asked once in a process. HF_HUB_OFFLINE and HF_ENDPOINT count as they do for the hub's own library.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    proxy = None if proxy_bypass(address.hostname or "") else getproxies().get(address.scheme)
    if proxy is not None:
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = address.port or (443 if address.scheme == "https" else 80)
    found: list[str | None] = []
    # In a thread, as no time limit ends the search for the address of a name.
    thread = Thread(target=lambda: found.append(_connect(address.hostname or "", port)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found[0] if found else f"no connection to {address.hostname} within {PATIENCE:g} s"


def _connect(host: str, port: int) -> str | None:
    """Open and close a connection; return what prevents it."""
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError as error:
        return f"no connection to {host}: {error.strerror or error}"
    return None


def refuse_unreachable(what: str, remedy: str) -> None:
    """Raise DataError with a `remedy` when `what` needs the hub, and the hub is out of reach."""
    reason = unreachable()
    if reason is not None:
        raise DataError(f"{what} needs the Hugging Face hub, which is out of reach ({reason}); {remedy}.")


@contextlib.contextmanager
def without_retries() -> Iterator[None]:
    """Let the hub's libraries use only what is stored on this machine in a block, while the hub is out of reach."""
    with contextlib.ExitStack() as held:
        if unreachable() is not None:
            for name in ("huggingface_hub.constants", "datasets.config"):
                if name in sys.modules:
                    held.enter_context(patch.object(sys.modules[name], "HF_HUB_OFFLINE", True))
        yield
