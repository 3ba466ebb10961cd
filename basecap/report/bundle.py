"""The scripts that draw charts in a page: Vega, Vega-Lite and their interface, in one text."""

import base64
import hashlib
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from basecap.errors import ConfigError
from basecap.report.figures import VEGA_LITE

#: The library that draws charts, as pip knows it.
LIBRARY = "vl-convert-python"

#: The scripts in a page, after what `label` returns.
_IN_PAGE = '<script data-bundle="{label}">(.*?)</script>'


def bundle(page: bytes) -> str:
    """Return the scripts as a page includes them, without "</script".

    Making them takes 1.8 of the 3.0 seconds of a report of 30 runs (CPU time), so they are taken from `page`, an
    earlier report of the same versions, where they are intact.

    Raises:
        ConfigError: the library that makes them is not installed, or cannot make them.
    """
    text = page.decode(errors="replace")
    for found in re.finditer(_IN_PAGE.format(label=f"{_versions()} ([0-9a-f]+)"), text, re.DOTALL):
        if found[1] == _digest(found[2]):
            return found[2]
    return _made()


@cache
def _made() -> str:
    try:
        made: str = library().javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)
    except ValueError as error:  # a release without this version of Vega-Lite
        raise ConfigError(
            f"charts need Vega-Lite {VEGA_LITE}, which this release of {LIBRARY} does not draw ({error}); install "
            "another release."
        ) from error
    return made.replace("</script", "<\\/script")


def library() -> ModuleType:
    """Import the library that draws charts, a large one that few reports need; raises ConfigError without it."""
    try:
        import vl_convert
    except ImportError as error:
        raise ConfigError(
            f"charts need the library {LIBRARY}, which cannot be imported ({error}); pip install {LIBRARY}."
        ) from error
    return vl_convert


def without_charts() -> str | None:
    """Return why a report would have no charts, as a sentence; None where charts can be drawn."""
    try:
        library()
    except ConfigError as error:
        return str(error)
    return None


def label(scripts: str) -> str:
    """Return what a page says of its scripts, by which a later report finds them: versions and a checksum."""
    return f"{_versions()} {_digest(scripts)}"


def source_of(script: str) -> str:
    """Return the source by which a content security policy allows this script alone; browsers read \\r\\n as \\n.

    >>> source_of("")
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    content = script.replace("\r\n", "\n").replace("\r", "\n").encode()
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


def _versions() -> str:
    try:
        return f"vl-convert {version(LIBRARY)} vega-lite {VEGA_LITE}"
    except PackageNotFoundError:
        return f"vl-convert vega-lite {VEGA_LITE}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
