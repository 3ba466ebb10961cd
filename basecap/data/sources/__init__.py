"""Sources of text, one file each."""

from basecap.data.sources._contract import (
    PLACEHOLDER,
    SOURCES,
    SPLITS,
    Document,
    Part,
    Source,
    Split,
    files_below,
    plugin_of,
    source,
    split_of,
)

__all__ = [
    "PLACEHOLDER",
    "SOURCES",
    "SPLITS",
    "Document",
    "Part",
    "Source",
    "Split",
    "files_below",
    "plugin_of",
    "source",
    "split_of",
]
