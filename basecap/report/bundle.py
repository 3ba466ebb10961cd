"""The scripts that draw charts in a page: Vega, Vega-Lite and their interface, in one text."""

import contextlib
import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import vl_convert

from basecap.errors import DataError
from basecap.files import read, replacing
from basecap.report.figures import VEGA_LITE


@cache
def bundle() -> str:
    """Return the scripts as a page includes them.

    Making them takes two seconds, so they are kept in the home directory, below .cache/basecap, by their versions. A
    damaged copy is replaced; where none can be written they are made each time.
    """
    try:
        path = Path.home() / ".cache/basecap" / f"vega-{version('vl-convert-python')}-{VEGA_LITE}.js"
    except RuntimeError:  # this user has no home directory
        return _bundled()
    with contextlib.suppress(DataError):
        digest, _, text = (read(path) or b"").decode(errors="replace").partition("\n")
        if digest == _digest(text):
            return text
    text = _bundled()
    with contextlib.suppress(DataError), replacing(path) as file:
        file.write(f"{_digest(text)}\n{text}".encode())
    return text


def _bundled() -> str:
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE).replace("</script", "<\\/script")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
