"""The scripts that draw charts in a page: Vega, Vega-Lite and their interface, in one text."""

import base64
import hashlib
import re
from functools import cache
from importlib.metadata import version

from basecap.report.figures import VEGA_LITE

#: The scripts in a page, after what `label` returns.
_IN_PAGE = '<script data-bundle="{label}">(.*?)</script>'


def bundle(page: bytes) -> str:
    """Return the scripts as a page includes them, without "</script".

    Making them takes 1.8 of the 3.0 seconds of a report of 30 runs (CPU time), so they are taken from `page`, an
    earlier report of the same versions, where they are intact.
    """
    text = page.decode(errors="replace")
    for found in re.finditer(_IN_PAGE.format(label=f"{_versions()} ([0-9a-f]+)"), text, re.DOTALL):
        if found[1] == _digest(found[2]):
            return found[2]
    return _made()


@cache
def _made() -> str:
    import vl_convert  # a large library, which few reports need

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE).replace("</script", "<\\/script")


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
    return f"vl-convert {version('vl-convert-python')} vega-lite {VEGA_LITE}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
