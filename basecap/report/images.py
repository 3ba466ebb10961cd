"""Charts as files for papers and slides."""

from typing import Literal

from basecap.report.bundle import library
from basecap.report.figures import VEGA_LITE, Spec

#: Formats of the files that charts are written to; the suffix of a file is its format.
ImageFormat = Literal["svg", "pdf"]


def image(chart: Spec, form: ImageFormat) -> bytes:
    """Return the content of a file that shows a chart; raises ConfigError without the library that draws it."""
    draw = library()
    if form == "pdf":
        content: bytes = draw.vegalite_to_pdf(chart, vl_version=VEGA_LITE)
        return content
    text: str = draw.vegalite_to_svg(chart, vl_version=VEGA_LITE)
    return text.encode()
