"""Sources of text, one file each."""

from basecap.data.sources._contract import (
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
